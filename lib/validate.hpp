// Turns what a caller passed into a Problem, or says what is wrong with it. Touches
// neither CUDA nor the memory behind any pointer but the structs' own.
#pragma once

#include "nf4/nf4.h"
#include "problem.hpp"

namespace nf4 {

nf4_status validate_shape(const nf4_tensor *tensor, Weight &weight);

nf4_status validate_dequant(const nf4_tensor *tensor, void *out, nf4_dtype dtype,
                            DequantProblem &problem);

nf4_status validate_quantize(const void *in, nf4_dtype dtype, const nf4_tensor *tensor,
                             void *workspace, size_t workspace_bytes, QuantizeProblem &problem);

nf4_status validate_threads(int32_t threads);

}  // namespace nf4
