// Launches of the skinny kernels.
#pragma once

#include "cuda/matmul/skinny/args.hpp"
#include "cuda/matmul/target.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// Enqueues a skinny kernel. The family's kernels may use all the shared memory of a CTA.
cudaError_t launch_skinny(const MatmulTarget &target, const void *kernel, const MatmulArgs &matmul,
                          const LoraCtaArgs &lora, nf4_dtype dtype, int config);

// The same for integer weights, with the family's kernel for the layout.
cudaError_t launch_skinny(const MatmulTarget &target, const Int4MatmulArgs &matmul, nf4_dtype dtype,
                          int config);

// Divides shared memory between the partial sums and scales of groups of up to `tiles` rows of warp
// tiles, after plan_work; returns its bytes.
int plan_skinny_smem(const SkinnyLayout &layout, int max_m, int64_t tiles, const GpuFacts &gpu,
                     SkinnyArgs &args);

// The same of integer weights.
int plan_int4_skinny_smem(const SkinnySmem &smem, int64_t tiles, const GpuFacts &gpu,
                          Int4SkinnyArgs &args);

// Makes the map of the packed weight. Neighbouring words are neighbours along K in
// compressed-tensors, and along N in GPTQ.
cudaError_t make_int4_skinny_map(const Int4View &weight, TensorMap &map);

// The products of one launch, which have their configuration, dtype and kind of scales in common.
template <class W>
struct SkinnyBatchProblems {
  const MatmulProblemOf<W> *list[kSkinnyBatchMax];
  int count = 0;
};

// Whether one more fits into the launch. Each of them alone takes a skinny kernel.
bool joins_launch(const SkinnyBatchProblems<Weight> &problems, const MatmulProblem &problem,
                  const GpuFacts &gpu);

// Does the same as launch_skinny with a kernel for several weights.
cudaError_t launch_skinny_batch(const MatmulTarget &target, const void *kernel,
                                const MatmulArgs *matmuls, int count, nf4_dtype dtype, int config);

}  // namespace nf4::cuda
