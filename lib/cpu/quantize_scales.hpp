// The second half of nested quantization, fast; quantize_scales_reference is its oracle.
#pragma once

#include "problem.hpp"

namespace nf4::cpu {

// As Variant::quantize_scales.
void quantize_scales(const Weight &weight, const float *scales, double *partial_sums, int threads);

}  // namespace nf4::cpu
