// Quantize with vector kernels: the codes, and one float of absmax for each block.
#pragma once

#include "cpu/dequant/kernels.hpp"
#include "cpu/quantize/kernels.hpp"
#include "cpu/ranges.hpp"
#include "problem.hpp"

namespace nf4::cpu {

void quantize_vector(const QuantizeKernels &kernels, const QuantizeProblem &problem, float *absmax,
                     BlockRange blocks);

void int4_quantize_vector(const DequantKernels &words, const QuantizeKernels &kernels,
                          const Int4QuantizeProblem &problem, RowRange n);

// The functions of a Variant, for each set of kernels.
template <const QuantizeKernels &kernels>
void quantize_with(const QuantizeProblem &problem, float *absmax, BlockRange blocks) {
  quantize_vector(kernels, problem, absmax, blocks);
}
template <const DequantKernels &words, const QuantizeKernels &kernels>
void int4_quantize_with(const Int4QuantizeProblem &problem, RowRange n) {
  int4_quantize_vector(words, kernels, problem, n);
}

}  // namespace nf4::cpu
