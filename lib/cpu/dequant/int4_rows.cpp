#include "cpu/dequant/int4_rows.hpp"

#include <algorithm>
#include <cstring>

#include "cpu/dequant/range.hpp"
#include "cpu/dtypes.hpp"
#include "cpu/weight/int4.hpp"

namespace nf4::cpu {
namespace {

constexpr float kCodes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

bool has_rows_of_codes(const Int4Weight &weight) {
  return weight.layout == NF4_INT4_COMPRESSED_TENSORS;
}

}  // namespace

int64_t Int4Rows::max_columns(const Int4Weight &weight, int64_t rows) {
  if (has_rows_of_codes(weight)) return kMaxColumns;
  const int64_t row_bytes = kCodeBytes / (ceil_divide(rows, 16) * 16);
  return std::min(kMaxColumns, row_bytes * 2 / kWordsCols * kWordsCols);
}

Int4Rows::Int4Rows(const DequantKernels &kernels, const Int4Weight &weight, nf4_dtype dtype)
    : kernels_(kernels), weight_(weight), dtype_(dtype), element_bytes_(element_bytes(dtype)) {}

// Whether a step is of one group.
bool Int4Rows::in_vectors() const {
  return weight_.g_idx == nullptr && (weight_.groups == 1 || weight_.group_size % kKernelStep == 0);
}

void Int4Rows::load(RowRange n, int64_t k, int64_t columns) {
  n_ = n.begin;
  k_ = k;
  if (has_rows_of_codes(weight_)) {
    stride_ = int4_words(weight_.cols) * 4;
    codes_ = reinterpret_cast<const uint8_t *>(weight_.packed) + n.begin * stride_ + k / 2;
    return;
  }
  if (!in_vectors()) return;
  const bool gptq = weight_.layout == NF4_INT4_GPTQ;
  codes_ = buffer_;
  stride_ = ceil_divide(columns, kWordsCols) * kWordsCols / 2;
  const Int4Place first = int4_code(weight_.layout, weight_.rows, weight_.cols, n.begin, k);
  const WordsArgs args{weight_.packed + first.word,
                       gptq ? weight_.rows : weight_.rows / 8,
                       n.end - n.begin,
                       columns,
                       buffer_,
                       stride_};
  (gptq ? kernels_.gptq_rows : kernels_.awq_rows)(args);
}

void Int4Rows::operator()(int64_t n, int64_t k, int64_t count, char *out) {
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
  read_int4_scales(weight_, n, group, groups, scales_);
  read_int4_zeros(weight_, n, group, groups, zeros_);
  DequantArgs args{kCodes, codes, scales_, 0, weight_.group_size, out, zeros_};
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
  dequant(kKernelStep);
}

}  // namespace nf4::cpu
