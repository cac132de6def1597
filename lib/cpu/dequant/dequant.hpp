// Dequantize by vector kernels.
#pragma once

#include "cpu/dequant/kernels.hpp"
#include "cpu/ranges.hpp"
#include "problem.hpp"

namespace nf4::cpu {

void dequant_vector(const DequantKernels &kernels, const DequantProblem &problem,
                    BlockRange blocks);

// The function of a Variant, for each set of kernels.
template <const DequantKernels &kernels>
void dequant_with(const DequantProblem &problem, BlockRange blocks) {
  dequant_vector(kernels, problem, blocks);
}

}  // namespace nf4::cpu
