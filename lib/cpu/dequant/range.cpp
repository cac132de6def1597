#include "cpu/dequant/range.hpp"

#include <algorithm>
#include <cstring>

#include "cpu/weight/scales.hpp"

namespace nf4::cpu {

RangeDequantizer::RangeDequantizer(const DequantKernels &kernels, const Weight &weight,
                                   nf4_dtype dtype)
    : weight_(weight), kernel_(kernels, weight, dtype), element_bytes_(element_bytes(dtype)) {}

void RangeDequantizer::operator()(int64_t first, int64_t count, char *out) {
  const int64_t lead = first % kKernelStep;
  if (lead == 0 && count % kKernelStep == 0) return dequant_steps(first, first + count, out);
  dequant_steps(first - lead, first + count, shifted_);
  std::memcpy(out, shifted_ + lead * element_bytes_, count * element_bytes_);
  std::memset(out + count * element_bytes_, 0, (to_steps(count) - count) * element_bytes_);
}

// Dequantizes whole steps from `begin` to `end` or beyond it.
void RangeDequantizer::dequant_steps(int64_t begin, int64_t end, char *out) {
  const int64_t in_block = begin & (weight_.blocksize() - 1);
  if (in_block != 0) {
    const int64_t part = std::min(end - begin, weight_.blocksize() - in_block);
    dequant_blocks(begin, part, out);
    begin += part;
    out += part * element_bytes_;
  }
  if (begin < end) dequant_blocks(begin, end - begin, out);
}

// Dequantizes elements of one block, or of several if they begin with a whole one.
void RangeDequantizer::dequant_blocks(int64_t first, int64_t elements, char *out) {
  const int64_t block = first >> weight_.blocksize_log2;
  const int64_t last = (first + elements - 1) >> weight_.blocksize_log2;
  read_scales(weight_, block, last - block + 1, scales_);
  std::transform(scales_, scales_ + (last - block + 1), scales_, canonical);
  scales_[last - block + 1] = 0;  // the second block of a step that ends with the range
  const int64_t readable = weight_.elements - first;
  const int64_t whole = std::min(to_steps(elements), readable - readable % kKernelStep);
  const uint8_t *packed = weight_.packed + first / 2;
  kernel_({nullptr, packed, scales_, whole, weight_.blocksize(), out});
  if (whole >= elements) return;
  uint8_t padded[kKernelStep / 2] = {};
  std::memcpy(padded, packed + whole / 2, (elements - whole + 1) / 2);
  kernel_({nullptr, padded, scales_ + (last - block), kKernelStep, weight_.blocksize(),
           out + whole * element_bytes_});
}

}  // namespace nf4::cpu
