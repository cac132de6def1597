// Variants made of vector kernels.
#pragma once

#include "cpu/backend.hpp"
#include "cpu/kernels.hpp"

namespace nf4::cpu {

void dequant_vector(const KernelSet &kernels, const DequantProblem &problem, BlockRange blocks);
void quantize_vector(const KernelSet &kernels, const QuantizeProblem &problem, float *absmax,
                     BlockRange blocks);

// The functions of a Variant, for each set of kernels.
template <const KernelSet &kernels>
void dequant_with(const DequantProblem &problem, BlockRange blocks) {
  dequant_vector(kernels, problem, blocks);
}
template <const KernelSet &kernels>
void quantize_with(const QuantizeProblem &problem, float *absmax, BlockRange blocks) {
  quantize_vector(kernels, problem, absmax, blocks);
}

}  // namespace nf4::cpu
