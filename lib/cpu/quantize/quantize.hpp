// Quantize by vector kernels: the codes, and one float of absmax for each block.
#pragma once

#include "cpu/quantize/kernels.hpp"
#include "cpu/ranges.hpp"
#include "problem.hpp"

namespace nf4::cpu {

void quantize_vector(const QuantizeKernels &kernels, const QuantizeProblem &problem, float *absmax,
                     BlockRange blocks);

// The function of a Variant, for each set of kernels.
template <const QuantizeKernels &kernels>
void quantize_with(const QuantizeProblem &problem, float *absmax, BlockRange blocks) {
  quantize_vector(kernels, problem, absmax, blocks);
}

}  // namespace nf4::cpu
