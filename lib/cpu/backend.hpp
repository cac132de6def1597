// The CPU backend: the functions that api.cpp calls, and the list of variants.
#pragma once

#include "cpu/lora_grad.hpp"
#include "cpu/ranges.hpp"
#include "problem.hpp"

namespace nf4 {
struct RoundedCodebook;
}

namespace nf4::cpu {

// The functions of integer weights. Each works on some rows, which begin at a multiple of 8.
struct Int4Functions {
  void (*dequant)(const Int4DequantProblem &problem, RowRange n);
  void (*quantize)(const Int4QuantizeProblem &problem, RowRange n);
  void (*matmul)(const Int4MatmulProblem &problem, RowRange n);
};

// The functions of one instruction set.
struct Variant {
  const char *name;
  bool (*supported)();
  void (*dequant)(const DequantProblem &problem, BlockRange blocks);
  // `absmax` gets one float per block. For a nested weight it is in the workspace.
  void (*quantize)(const QuantizeProblem &problem, float *absmax, BlockRange blocks);
  // The second half of nested quantization: turns the scales, one per block, into their mean and
  // their 8-bit codes. partial_sums has room for one sum for each kScalesPerPartialSum scales.
  void (*quantize_scales)(const Weight &weight, const float *scales, double *partial_sums,
                          int threads);
  // Computes the codebook that matmul needs for all rows of a problem. NULL if matmul never reads
  // it.
  RoundedCodebook (*bf16_codebook)(const MatmulProblem &problem);
  // Multiplies all rows of x with some rows of the weight.
  void (*matmul)(const MatmulProblem &problem, const RoundedCodebook &bf16_codebook, RowRange n);
  // Multiplies all rows of dy with some columns of the weight.
  void (*matmul_grad)(const MatmulProblem &problem, RowRange k);
  // Writes rows of the adapter's product, x A^T or dy B, which the functions above read.
  void (*lora_product)(const MatmulProblem &problem, RowRange m);
  // Computes columns of a gradient of an adapter's matrix.
  void (*lora_grad)(const LoraGradPart &part, RowRange columns);
  Int4Functions int4;
};

// All variants of this build, best first; the last is the scalar reference, which runs
// everywhere.
struct VariantList {
  const Variant *first;
  int count;
  const Variant *begin() const { return first; }
  const Variant *end() const { return first + count; }
};
VariantList variants();

const Variant &variant_in_use();

// For tests: sets the variant that every later call uses; NULL restores the choice by CPU features.
// Not thread safe.
void force_variant(const Variant *variant);

// threads is the most threads to use; 0 means one for each processor the process may run on.
void dequant(const DequantProblem &problem, int threads);
void quantize(const QuantizeProblem &problem, int threads);
void dequant(const Int4DequantProblem &problem, int threads);
void quantize(const Int4QuantizeProblem &problem, int threads);
void reorder(const Int4ReorderProblem &problem, int threads);
// Computes one matmul or several. No matmul may write anything that another reads or writes.
void matmul(const MatmulProblem *problems, int count, int threads);
void matmul(const Int4MatmulProblem *problems, int count, int threads);
void matmul_grad(const MatmulProblem &problem, int threads);
void lora_grad(const LoraGradProblem &problem, int threads);
// Computes products of experts, or their gradient.
void matmul_grouped(const GroupedProblem &problem, int threads);
void matmul_grouped(const Int4GroupedProblem &problem, int threads);

// Says which way is expected to take less time; see nf4_matmul_path.
nf4_path path_of(const MatmulProblem &problem);

}  // namespace nf4::cpu
