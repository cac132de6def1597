// The scalar reference: the oracle of every test. It is never optimised.
#pragma once

#include "core/formats.hpp"
#include "cpu/lora_grad.hpp"
#include "cpu/ranges.hpp"
#include "problem.hpp"

namespace nf4::cpu {

void dequant_reference(const DequantProblem &problem, BlockRange blocks);
void quantize_reference(const QuantizeProblem &problem, float *absmax, BlockRange blocks);
// Quantizes blocks to MXFP4 or NVFP4. All variants use it.
void quantize_e2m1(const QuantizeProblem &problem, BlockRange blocks);

// Like Variant::quantize_scales, on one thread and without partial sums.
void quantize_scales_reference(const Weight &weight, const float *scales, double *, int);

// Sums the products of unrounded numbers in binary64, in order.
void matmul_reference(const MatmulProblem &problem, const RoundedCodebook &, RowRange rows);
void matmul_grad_reference(const MatmulProblem &problem, RowRange k);

// Writes rows of the adapter's product, x A^T or dy B, to problem.lora.product, which the functions
// above read. The sums are like theirs, then rounded to the problem's dtype.
void lora_product_reference(const MatmulProblem &problem, RowRange m);

// Sums over m in binary64, multiplies with the scale, and rounds to binary32 and then to the
// gradient's dtype.
void lora_grad_reference(const LoraGradPart &part, RowRange columns);

// For integer weights. Rows of quantize and reorder begin at a multiple of 8, so that ranges share
// no word.
void int4_dequant_reference(const Int4DequantProblem &problem, RowRange n);
void int4_quantize_reference(const Int4QuantizeProblem &problem, RowRange n);
void int4_matmul_reference(const Int4MatmulProblem &problem, RowRange n);
// Writes the columns in the order of their groups to problem.permutation; then the codes.
void int4_permutation(const Int4ReorderProblem &problem);
void int4_reorder_reference(const Int4ReorderProblem &problem, RowRange n);

// The sum in binary64 over the complete binary tree: neighbours are added first, then neighbouring
// pairs, and so on; missing leaves are zero. Any aligned power-of-two part of the data is a
// subtree, so a parallel reduction gives the same bits.
double tree_sum(const float *values, int64_t count);
double tree_sum(const double *values, int64_t count);

}  // namespace nf4::cpu
