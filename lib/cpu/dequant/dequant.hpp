// Dequantize with vector kernels.
#pragma once

#include "cpu/dequant/kernels.hpp"
#include "cpu/ranges.hpp"
#include "problem.hpp"

namespace nf4::cpu {

void dequant_vector(const DequantKernels &kernels, const DequantProblem &problem,
                    BlockRange blocks);

void int4_dequant_vector(const DequantKernels &kernels, const Int4DequantProblem &problem,
                         RowRange n);

// The functions of a Variant, for each set of kernels.
template <const DequantKernels &kernels>
void dequant_with(const DequantProblem &problem, BlockRange blocks) {
  dequant_vector(kernels, problem, blocks);
}
template <const DequantKernels &kernels>
void int4_dequant_with(const Int4DequantProblem &problem, RowRange n) {
  int4_dequant_vector(kernels, problem, n);
}

}  // namespace nf4::cpu
