// The second half of nested quantization: turns the scales into 8-bit codes. Its oracle is
// quantize_scales_reference.
#pragma once

#include "cpu/quantize/kernels.hpp"
#include "problem.hpp"

namespace nf4::cpu {

// There is one partial sum for this many scales: fewer than QuantizeWorkspace has room for.
constexpr int64_t kScalesPerPartialSum = 1024;
static_assert(kScalesPerPartialSum * 32 >= kElementsPerPartialSum, "blocks are 32 or more");

void quantize_scales(const QuantizeKernels &kernels, const Weight &weight, const float *scales,
                     double *partial_sums, int threads);

// The function of a Variant, for each set of kernels.
template <const QuantizeKernels &kernels>
void quantize_scales_with(const Weight &weight, const float *scales, double *partial_sums,
                          int threads) {
  quantize_scales(kernels, weight, scales, partial_sums, threads);
}

}  // namespace nf4::cpu
