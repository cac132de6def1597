// Parses a text of costs (nf4_set_costs), and refuses a text that it does not understand to the
// last byte.
#include "cuda/costs/text.hpp"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "cuda/costs/table.hpp"
#include "status.hpp"

namespace nf4::cuda {
namespace {

using std::string_view;

constexpr string_view kFirstLine = NF4_COSTS_FIRST_LINE;
constexpr string_view kLastLine = "end";

constexpr string_view kProducts[] = {
    "codebook", "codebook_lora", "gradient", "gradient_lora", "gptq", "awq", "compressed_tensors"};
constexpr string_view kDtypes[] = {"fp16", "bf16"};
constexpr nf4_dtype kDtypeOf[] = {NF4_DTYPE_FP16, NF4_DTYPE_BF16};
constexpr string_view kStrategies[] = {"mma", "skinny", "wgmma", "multistage", "dense"};
static_assert(std::size(kProducts) == static_cast<size_t>(CostedProduct::kCount) &&
              std::size(kStrategies) == kStrategyCount &&
              static_cast<int>(MatmulKernel::kMma) == 0 &&
              static_cast<int>(MatmulKernel::kSkinny) == 1 &&
              static_cast<int>(MatmulKernel::kWgmma) == 2 &&
              static_cast<int>(MatmulKernel::kMultistage) == 3);

// The words of a line, one space apart.
class Words {
 public:
  explicit Words(string_view line) : rest_(line) {}

  bool next(string_view &word) {
    const size_t space = rest_.find(' ');
    word = rest_.substr(0, space);
    ended_ = space == string_view::npos;
    rest_.remove_prefix(ended_ ? rest_.size() : space + 1);
    return !word.empty();
  }
  string_view rest() const { return rest_; }
  bool ended() const { return ended_; }

  // The place of the next word in a list.
  template <size_t Count>
  bool next(const string_view (&list)[Count], int &index) {
    string_view word;
    if (!next(word)) return false;
    const string_view *const found = std::find(list, list + Count, word);
    index = static_cast<int>(found - list);
    return found != list + Count;
  }

  bool next(int64_t &number) {
    string_view word;
    if (!next(word) || word.size() > 9) return false;
    number = 0;
    for (const char digit : word) {
      if (digit < '0' || digit > '9') return false;
      number = number * 10 + (digit - '0');
    }
    return true;
  }

  // A decimal fraction without sign or exponent, whatever the locale.
  bool next(float &number) {
    string_view word;
    if (!next(word) || word.size() > 18) return false;
    const size_t point = std::min(word.find('.'), word.size());
    double value = 0, unit = 1;
    for (size_t i = 0; i < word.size(); ++i) {
      if (i == point && i > 0 && i + 1 < word.size()) continue;
      if (word[i] < '0' || word[i] > '9') return false;
      value = value * 10 + (word[i] - '0');
      if (i > point) unit *= 10;
    }
    number = static_cast<float>(value / unit);
    return true;
  }

 private:
  string_view rest_;
  bool ended_ = false;
};

template <size_t Size>
bool copy_word(string_view word, char (&copy)[Size]) {
  if (word.empty() || word.size() >= Size) return false;
  std::memcpy(copy, word.data(), word.size());
  copy[word.size()] = '\0';
  return true;
}

bool parse_gpu(Words words, CostTable &table) {
  if (table.gpu_count == kMaxCostedGpus) return false;
  CostedGpu &gpu = table.gpus[table.gpu_count];
  string_view kernels;
  if (!words.next(gpu.compute_capability) || !words.next(kernels) ||
      !copy_word(kernels, gpu.kernels) || !words.next(gpu.multiprocessors) ||
      !words.next(gpu.shared_bytes) || !words.next(gpu.driver_version) ||
      !copy_word(words.rest(), gpu.name))
    return false;
  ++table.gpu_count;
  return true;
}

bool parse_row(string_view line, CostTable &table) {
  constexpr int64_t kMaxRowsOfX = 1 << 20;
  if (table.gpu_count == 0 || table.row_count == kMaxCostRows) return false;
  Words words(line);
  int product, dtype, strategy;
  int64_t m;
  CostRow &row = table.rows[table.row_count];
  if (!words.next(kProducts, product) || !words.next(kDtypes, dtype) ||
      !words.next(kStrategies, strategy) || !words.next(m) || m < 1 || m > kMaxRowsOfX ||
      !words.next(row.start) || !words.next(row.weights) || !words.next(row.rows) ||
      !words.next(row.columns) || !words.ended())
    return false;
  row.group = cost_group(table.gpu_count - 1, static_cast<CostedProduct>(product), kDtypeOf[dtype],
                         strategy);
  row.m = static_cast<int32_t>(m);
  if (table.row_count > 0) {
    const CostRow &before = table.rows[table.row_count - 1];
    if (row.group < before.group || (row.group == before.group && row.m <= before.m)) return false;
  }
  ++table.row_count;
  return true;
}

bool parse_line(string_view line, CostTable &table) {
  constexpr string_view kGpu = "gpu ";
  if (line.substr(0, kGpu.size()) == kGpu) return parse_gpu(Words(line.substr(kGpu.size())), table);
  return parse_row(line, table);
}

nf4_status refuse(int line, string_view text, const char *expected) {
  char shown[64];
  const size_t size = std::min(text.size(), sizeof shown - 1);
  std::transform(text.begin(), text.begin() + static_cast<ptrdiff_t>(size), shown,
                 [](char c) { return c >= ' ' && c <= '~' ? c : '?'; });
  shown[size] = '\0';
  return fail(NF4_STATUS_INVALID_ARGUMENT, "text has \"%s\" in line %d; expected %s", shown, line,
              expected);
}

}  // namespace

nf4_status parse_costs(const char *text, size_t bytes, CostTable &table) {
  table.gpu_count = table.row_count = 0;
  string_view rest(text, bytes), line;
  for (int number = 1;; ++number) {
    const size_t end = rest.find('\n');
    line = rest.substr(0, end);
    if (end == string_view::npos) return refuse(number, line, "a whole line, or \"end\" before it");
    rest.remove_prefix(end + 1);
    if (number == 1) {
      if (line != kFirstLine) return refuse(1, line, kFirstLine.data());
    } else if (line == kLastLine) {
      return rest.empty() ? NF4_STATUS_OK : refuse(number + 1, rest, "nothing after \"end\"");
    } else if (!parse_line(line, table)) {
      return refuse(number, line, "a GPU, a row of costs in ascending order, or \"end\"");
    }
  }
}

}  // namespace nf4::cuda
