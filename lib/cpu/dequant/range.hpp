// Dequantizes any range of a weight's elements, whether or not it begins with a block.
#pragma once

#include "core/formats.hpp"
#include "cpu/dequant/codes.hpp"
#include "problem.hpp"

namespace nf4::cpu {

// Rounds up to a multiple of kKernelStep.
constexpr int64_t to_steps(int64_t elements) {
  return ceil_divide(elements, kKernelStep) * kKernelStep;
}

class RangeDequantizer {
 public:
  static constexpr int64_t kMaxElements = 4096;
  static constexpr int64_t kMaxBytes = 8192;

  RangeDequantizer(const DequantKernels &kernels, const Weight &weight, nf4_dtype dtype);

  // Dequantizes `count` elements from `first` on, at most kMaxElements and kMaxBytes, and writes
  // zeros up to a whole kKernelStep.
  void operator()(int64_t first, int64_t count, char *out);

 private:
  void dequant_steps(int64_t begin, int64_t end, char *out);
  void dequant_blocks(int64_t first, int64_t elements, char *out);

  const Weight &weight_;
  const CodesDequantizer kernel_;
  const int64_t element_bytes_;
  float scales_[CodesDequantizer::max_scales(kMaxElements + 2 * kKernelStep)];
  alignas(64) char shifted_[kMaxBytes + 2 * kKernelStep * sizeof(float)];
};

}  // namespace nf4::cpu
