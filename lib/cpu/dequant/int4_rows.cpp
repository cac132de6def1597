#include "cpu/dequant/int4_rows.hpp"

#include <algorithm>
#include <cstring>

#include "cpu/dequant/int4_groups.hpp"
#include "cpu/dequant/range.hpp"
#include "cpu/dtypes.hpp"
#include "cpu/weight/int4.hpp"

namespace nf4::cpu {
namespace {

constexpr int64_t kLineBytes = 64;
// Padding between rows of codes, so that they are in different sets of the L1 cache.
constexpr int64_t kPad = 64;
// The most rows of one load(), in whole vectors.
constexpr int64_t kMaxRows = 512;

bool has_rows_of_codes(const Int4Weight &weight) {
  return weight.layout == NF4_INT4_COMPRESSED_TENSORS;
}

// The codes 0 to 15, from which the values of a group are made.
constexpr uint8_t kEveryCode[kKernelStep / 2] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe};

}  // namespace

int64_t Int4Rows::max_rows() const {
  constexpr int64_t kRows = 128, kRowsOfTables = 32;
  if (in_steps()) return kRows;
  const int64_t rows = (max_groups(code_bytes_) - 16) / weight_.groups / 8 * 8;
  return std::clamp<int64_t>(rows, 8, kRowsOfTables);
}

int64_t Int4Rows::max_columns(int64_t rows) const {
  if (has_rows_of_codes(weight_)) return kMaxColumns;
  const int64_t row_bytes = code_bytes_ / (ceil_divide(rows, 16) * 16);
  return std::min(kMaxColumns, (row_bytes - kPad) * 2 / kWordsCols * kWordsCols);
}

Int4Rows::Int4Rows(const DequantKernels &kernels, const Int4Weight &weight, nf4_dtype dtype,
                   int64_t code_bytes, uint8_t *codes, float *scales, float *zeros,
                   int64_t table_bytes, char *tables)
    : kernels_(kernels),
      weight_(weight),
      dtype_(dtype),
      element_bytes_(element_bytes(dtype)),
      code_bytes_(code_bytes),
      buffer_(codes),
      scales_(scales),
      zeros_(zeros),
      table_bytes_(table_bytes),
      tables_(tables) {}

// Tells whether every step lies within one group.
bool Int4Rows::in_steps() const {
  return weight_.g_idx == nullptr && (weight_.groups == 1 || weight_.group_size % kKernelStep == 0);
}

Int4Rows::Decode Int4Rows::decode_of(int64_t rows, int64_t groups) const {
  if (in_steps()) return Decode::kSteps;
  // Rounded up to a whole vector.
  const int64_t read = (has_rows_of_codes(weight_) ? 1 : rows) * groups + 16;
  const bool fits = groups * 16 * element_bytes_ <= table_bytes_ && read <= max_groups(code_bytes_);
  return fits ? Decode::kTables : Decode::kReference;
}

Int4Rows::Words Int4Rows::words(RowRange n, int64_t k, int64_t columns) const {
  const Int4Place place = int4_code(weight_.layout, weight_.rows, weight_.cols, n.begin, k);
  const char *first = reinterpret_cast<const char *>(weight_.packed + place.word);
  const int64_t rows = n.end - n.begin;
  if (weight_.layout == NF4_INT4_GPTQ) return {first, weight_.rows * 4, columns / 8, rows * 4};
  if (weight_.layout == NF4_INT4_AWQ) return {first, weight_.rows / 2, columns, rows / 2};
  return {first, int4_words(weight_.cols) * 4, rows, int4_words(columns) * 4};
}

void Int4Rows::load(RowRange n, int64_t k, int64_t columns) {
  n_ = n.begin;
  n_count_ = n.end - n.begin;
  k_ = k;
  const Words from = words(n, k, columns);
  codes_ = reinterpret_cast<const uint8_t *>(from.first);
  stride_ = from.stride;
  group_ = weight_.g_idx != nullptr ? 0 : k / weight_.group_size;
  groups_ = weight_.g_idx != nullptr ? weight_.groups
                                     : (k + columns - 1) / weight_.group_size - group_ + 1;
  decode_ = decode_of(n_count_, groups_);
  if (has_rows_of_codes(weight_) || decode_ == Decode::kReference) return;
  codes_ = buffer_;
  stride_ = ceil_divide(columns, kWordsCols) * kWordsCols / 2 + kPad;
  const WordsArgs args{reinterpret_cast<const uint32_t *>(from.first),
                       from.stride / 4,
                       n_count_,
                       columns,
                       buffer_,
                       stride_};
  (weight_.layout == NF4_INT4_GPTQ ? kernels_.gptq_rows : kernels_.awq_rows)(args);
  read_groups(n);
}

// Transposes from [group][row] to [row][group].
void Int4Rows::read_groups(RowRange n) {
  float scales[kMaxRows], zeros[kMaxRows];
  for (int64_t g = 0; g < groups_; ++g) {
    kernels_.groups(int4_groups(weight_, n.begin, group_ + g, n_count_, scales, zeros));
    for (int64_t i = 0; i < n_count_; ++i) {
      scales_[i * groups_ + g] = scales[i];
      zeros_[i * groups_ + g] = zeros[i];
    }
  }
}

void Int4Rows::expect(RowRange n, int64_t k, int64_t columns) {
  next_ = words(n, k, columns);
  next_row_ = next_byte_ = 0;
  const int64_t lines = next_.rows * ceil_divide(next_.bytes, kLineBytes);
  lines_per_row_ = ceil_divide(lines, n_count_);
}

void Int4Rows::prefetch() {
  for (int64_t i = 0; i < lines_per_row_ && next_row_ < next_.rows; ++i) {
    __builtin_prefetch(next_.first + next_row_ * next_.stride + next_byte_, 0, 2);
    next_byte_ += kLineBytes;
    if (next_byte_ < next_.bytes) continue;
    next_byte_ = 0;
    ++next_row_;
  }
}

void Int4Rows::operator()(int64_t n, int64_t k, int64_t count, char *out) {
  prefetch();
  const uint8_t *const codes = codes_ + (n - n_) * stride_ + (k - k_) / 2;
  if (decode_ == Decode::kSteps) {
    dequant_steps(codes, n, k, count, out);
  } else {
    if (decode_ == Decode::kTables) make_tables(n);
    with_dtype(dtype_, [&](auto type) {
      auto *values = reinterpret_cast<decltype(type) *>(out);
      if (decode_ == Decode::kTables) return look_up(codes, k, count, values);
      for (int64_t i = 0; i < count; ++i)
        values[i] = from_float<decltype(type)>(int4_value_at(weight_, n, k + i));
    });
  }
  std::memset(out + count * element_bytes_, 0, (to_steps(count) - count) * element_bytes_);
}

// Dequantizes whole steps; the last one may go beyond `count`.
void Int4Rows::dequant_steps(const uint8_t *codes, int64_t n, int64_t k, int64_t count, char *out) {
  const int64_t group = k / weight_.group_size;
  const int64_t groups = (k + count - 1) / weight_.group_size - group + 1;
  int64_t at = (n - n_) * groups_ + group - group_;
  if (has_rows_of_codes(weight_)) {
    at = 0;
    kernels_.groups(int4_groups(weight_, n, group, groups, scales_, zeros_));
  }
  DequantArgs args{kInt4Codebook, codes, scales_ + at, 0, weight_.group_size, out, zeros_ + at};
  const auto kernel = kernels_.int4[dtype_ - 1];
  const auto dequant = [&](int64_t elements) {
    args.elements = elements;
    if (elements > 0) kernel(args);
    args.packed += elements / 2;
    args.out = static_cast<char *>(args.out) + elements * element_bytes_;
    count -= elements;
  };
  const int64_t in_group = k % weight_.group_size;
  if (in_group != 0 && groups > 1) {
    dequant(weight_.group_size - in_group);
    ++args.scales;
    ++args.zeros;
  }
  const int64_t tail = count % kKernelStep;
  dequant(count - tail);
  if (tail == 0) return;
  // Only a weight with one group has a tail.
  uint8_t padded[kKernelStep / 2] = {};
  std::memcpy(padded, args.packed, (tail + 1) / 2);
  args.packed = padded;
  args.blocksize = kKernelStep;
  dequant(kKernelStep);
}

// The kernel makes the tables, so that their bits are the same as everywhere else.
void Int4Rows::make_tables(int64_t n) {
  const float *scales = scales_, *zeros = zeros_;
  if (has_rows_of_codes(weight_)) {
    kernels_.groups(int4_groups(weight_, n, group_, groups_, scales_, zeros_));
  } else {
    scales += (n - n_) * groups_;
    zeros += (n - n_) * groups_;
  }
  alignas(64) char values[kKernelStep * sizeof(float)];
  const int64_t bytes = 16 * element_bytes_;
  for (int64_t g = 0; g < groups_; ++g) {
    kernels_.int4[dtype_ - 1](
        {kInt4Codebook, kEveryCode, scales + g, kKernelStep, kKernelStep, values, zeros + g});
    std::memcpy(tables_ + g * bytes, values, bytes);
  }
}

template <class T>
void Int4Rows::look_up(const uint8_t *codes, int64_t k, int64_t count, T *out) const {
  const auto *const tables = reinterpret_cast<const T *>(tables_);
  const auto code = [codes](int64_t i) { return codes[i / 2] >> i % 2 * 4 & 15; };
  if (weight_.g_idx != nullptr) {
    const int32_t *const g_idx = weight_.g_idx + k;
    for (int64_t i = 0; i + 1 < count; i += 2) {
      out[i] = tables[int64_t{g_idx[i]} * 16 + (codes[i / 2] & 15)];
      out[i + 1] = tables[int64_t{g_idx[i + 1]} * 16 + (codes[i / 2] >> 4)];
    }
    if (const int64_t last = count - 1; count % 2 != 0)
      out[last] = tables[int64_t{g_idx[last]} * 16 + code(last)];
    return;
  }
  const int64_t size = weight_.group_size;
  for (int64_t i = 0; i < count;) {
    const T *const table = tables + ((k + i) / size - group_) * 16;
    for (const int64_t end = std::min(count, i + size - (k + i) % size); i < end; ++i)
      out[i] = table[code(i)];
  }
}

}  // namespace nf4::cpu
