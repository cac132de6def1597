// The second half of nested quantization, fast; quantize_scales_reference is its oracle.
#pragma once

#include "problem.hpp"

namespace nf4::cpu {

// One partial sum for so many scales: fewer than QuantizeWorkspace has room for.
constexpr int64_t kScalesPerPartialSum = 1024;
static_assert(kScalesPerPartialSum * 32 >= kElementsPerPartialSum, "blocks are 32 or more");

// As Variant::quantize_scales.
void quantize_scales(const Weight &weight, const float *scales, double *partial_sums, int threads);

}  // namespace nf4::cpu
