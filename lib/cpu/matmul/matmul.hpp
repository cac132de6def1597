// Matmul by vector kernels.
#pragma once

#include "cpu/dequant/kernels.hpp"
#include "cpu/matmul/kernels.hpp"
#include "cpu/ranges.hpp"
#include "problem.hpp"

namespace nf4::cpu {

// What a variant multiplies with; bf16 is NULL where it has no such instructions.
struct MatmulSet {
  const DequantKernels &dequant;
  const MatmulKernels &fp32;
  const MatmulKernels *bf16;
};

// All of x times the rows n of the weight.
void matmul_vector(const MatmulSet &set, const MatmulProblem &problem, RowRange n);

// The function of a Variant, for each set of kernels.
template <const DequantKernels &dequant, const MatmulKernels &fp32,
          const MatmulKernels *bf16 = nullptr>
void matmul_with(const MatmulProblem &problem, RowRange n) {
  matmul_vector({dequant, fp32, bf16}, problem, n);
}

}  // namespace nf4::cpu
