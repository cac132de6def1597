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
// Between rows of codes, so that they are in other sets of the L1 cache.
constexpr int64_t kPad = 64;
// Of one load(), in whole vectors.
constexpr int64_t kMaxRows = 512;

bool has_rows_of_codes(const Int4Weight &weight) {
  return weight.layout == NF4_INT4_COMPRESSED_TENSORS;
}

}  // namespace

int64_t Int4Rows::max_columns(int64_t rows) const {
  if (has_rows_of_codes(weight_)) return kMaxColumns;
  const int64_t row_bytes = code_bytes_ / (ceil_divide(rows, 16) * 16);
  return std::min(kMaxColumns, (row_bytes - kPad) * 2 / kWordsCols * kWordsCols);
}

Int4Rows::Int4Rows(const DequantKernels &kernels, const Int4Weight &weight, nf4_dtype dtype,
                   int64_t code_bytes, uint8_t *codes, float *scales, float *zeros)
    : kernels_(kernels),
      weight_(weight),
      dtype_(dtype),
      element_bytes_(element_bytes(dtype)),
      code_bytes_(code_bytes),
      buffer_(codes),
      scales_(scales),
      zeros_(zeros) {}

// Whether a step is of one group.
bool Int4Rows::in_vectors() const {
  return weight_.g_idx == nullptr && (weight_.groups == 1 || weight_.group_size % kKernelStep == 0);
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
  if (has_rows_of_codes(weight_) || !in_vectors()) return;
  codes_ = buffer_;
  stride_ = ceil_divide(columns, kWordsCols) * kWordsCols / 2 + kPad;
  const WordsArgs args{reinterpret_cast<const uint32_t *>(from.first),
                       from.stride / 4,
                       n_count_,
                       columns,
                       buffer_,
                       stride_};
  (weight_.layout == NF4_INT4_GPTQ ? kernels_.gptq_rows : kernels_.awq_rows)(args);
  read_groups(n, k, columns);
}

// From [group][row] to [row][group].
void Int4Rows::read_groups(RowRange n, int64_t k, int64_t columns) {
  group_ = k / weight_.group_size;
  groups_ = (k + columns - 1) / weight_.group_size - group_ + 1;
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
  if (in_vectors()) {
    dequant_steps(codes_ + (n - n_) * stride_ + (k - k_) / 2, n, k, count, out);
  } else {
    with_dtype(dtype_, [&](auto type) {
      auto *values = reinterpret_cast<decltype(type) *>(out);
      for (int64_t i = 0; i < count; ++i)
        values[i] = from_float<decltype(type)>(int4_value_at(weight_, n, k + i));
    });
  }
  std::memset(out + count * element_bytes_, 0, (to_steps(count) - count) * element_bytes_);
}

// Whole steps, of which the last may be more than `count`.
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
  // Of a weight of one group.
  uint8_t padded[kKernelStep / 2] = {};
  std::memcpy(padded, args.packed, (tail + 1) / 2);
  args.packed = padded;
  args.blocksize = kKernelStep;
  dequant(kKernelStep);
}

}  // namespace nf4::cpu
