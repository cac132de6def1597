// Matmul with vector kernels.
#pragma once

#include "core/formats.hpp"
#include "cpu/dequant/kernels.hpp"
#include "cpu/lora_grad.hpp"
#include "cpu/matmul/kernels.hpp"
#include "cpu/ranges.hpp"
#include "problem.hpp"

namespace nf4::cpu {

// The kernels with which a variant multiplies. bf16 are those for x in bf16; NULL if they are fp32.
struct MatmulSet {
  const DequantKernels &dequant;
  const MatmulKernels &fp32;
  const MatmulKernels *bf16;
};

const MatmulKernels &kernels_for(const MatmulSet &set, nf4_dtype dtype);

// The codebook that matmul_vector() needs for all rows of a problem. It is not set if it needs
// none.
RoundedCodebook bf16_codebook_for(const MatmulProblem &problem);

// Multiplies all of x with the rows n of the weight.
void matmul_vector(const MatmulSet &set, const MatmulProblem &problem,
                   const RoundedCodebook &bf16_codebook, RowRange n);

// Computes columns of the gradient, and rows of an adapter's product.
void matmul_grad_vector(const MatmulSet &set, const MatmulProblem &problem, RowRange k);
void lora_product_vector(const MatmulSet &set, const MatmulProblem &problem, RowRange m);

// Computes columns of a gradient of an adapter's matrix, with fp32 kernels.
void lora_grad_vector(const MatmulKernels &kernels, const LoraGradPart &part, RowRange columns);

void int4_matmul_vector(const MatmulSet &set, const Int4MatmulProblem &problem, RowRange n);

// The functions of a Variant, for each set of kernels.
template <const DequantKernels &dequant, const MatmulKernels &fp32,
          const MatmulKernels *bf16 = nullptr>
void matmul_with(const MatmulProblem &problem, const RoundedCodebook &bf16_codebook, RowRange n) {
  matmul_vector({dequant, fp32, bf16}, problem, bf16_codebook, n);
}
template <const DequantKernels &dequant, const MatmulKernels &fp32,
          const MatmulKernels *bf16 = nullptr>
void matmul_grad_with(const MatmulProblem &problem, RowRange k) {
  matmul_grad_vector({dequant, fp32, bf16}, problem, k);
}
template <const DequantKernels &dequant, const MatmulKernels &fp32,
          const MatmulKernels *bf16 = nullptr>
void lora_product_with(const MatmulProblem &problem, RowRange m) {
  lora_product_vector({dequant, fp32, bf16}, problem, m);
}
template <const MatmulKernels &fp32>
void lora_grad_with(const LoraGradPart &part, RowRange columns) {
  lora_grad_vector(fp32, part, columns);
}
template <const DequantKernels &dequant, const MatmulKernels &fp32,
          const MatmulKernels *bf16 = nullptr>
void int4_matmul_with(const Int4MatmulProblem &problem, RowRange n) {
  int4_matmul_vector({dequant, fp32, bf16}, problem, n);
}

}  // namespace nf4::cpu
