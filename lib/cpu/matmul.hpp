// Matmul by vector kernels.
#pragma once

#include "cpu/backend.hpp"
#include "cpu/kernels.hpp"

namespace nf4::cpu {

// What a variant multiplies with; bf16 is NULL where it has no such instructions.
struct MatmulSet {
  const KernelSet &dense;
  const MatmulKernels &fp32;
  const MatmulKernels *bf16;
};

void matmul_vector(const MatmulSet &set, const MatmulProblem &problem, RowRange rows);

// The function of a Variant, for each set of kernels.
template <const KernelSet &dense, const MatmulKernels &fp32, const MatmulKernels *bf16 = nullptr>
void matmul_with(const MatmulProblem &problem, RowRange rows) {
  matmul_vector({dense, fp32, bf16}, problem, rows);
}

}  // namespace nf4::cpu
