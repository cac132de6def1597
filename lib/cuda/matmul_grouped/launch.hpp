// The parts that launches of grouped products share.
#pragma once

#include <type_traits>

#include "cuda/matmul/launch.hpp"
#include "cuda/matmul/target.hpp"
#include "cuda/matmul_grouped/args.hpp"
#include "cuda/matmul_grouped/choose.hpp"
#include "cuda/matmul_grouped/kernels.hpp"
#include "cuda/matmul_grouped/wgmma_args.hpp"

namespace nf4::cuda {

template <class W>
typename ArgsOf<W>::Matmul experts_args(const GroupedProblemOf<W> &problem, const W &weight) {
  return matmul_args(problem, weight, problem.x_rows, has_x_vectors(two_rows(problem, weight)));
}

template <class W>
Groups groups_of(const GroupedProblemOf<W> &problem) {
  return {problem.ends,
          problem.x_index,
          problem.row_scale,
          problem.bias_stride,
          problem.expert_rows(),
          problem.experts,
          static_cast<int32_t>(problem.m)};
}

// Whether skinny kernels multiply the kind of weight.
template <class W>
constexpr bool kHasGroupedSkinny = has_experts_kernel(kind_of(W{}), kSkinny2);

// Names the operation in error messages.
constexpr const char *launching_experts(const Weight &) { return "launching matmul_grouped"; }
constexpr const char *launching_experts(const TransposedWeight &) {
  return "launching matmul_grouped_grad";
}
constexpr const char *launching_experts(const Int4Weight &) {
  return "launching int4_matmul_grouped";
}

// The same for multistage kernels.
template <class W>
constexpr bool kHasGroupedMultistage = has_experts_kernel(kind_of(W{}), kFirstMultistage);

// ---- What a kind of weight answers (lib/cuda/kinds) ----------------------------------------

// Returns the mma kernel of a family.
const void *experts_mma_kernel(const GroupedKernels &kernels, const GroupedProblem &problem);
const void *experts_mma_kernel(const GroupedKernels &kernels, const GroupedGradProblem &problem);
const void *experts_mma_kernel(const GroupedKernels &kernels, const Int4GroupedProblem &problem);

// ---- Skinny kernels ------------------------------------------------------------------------

cudaError_t launch_grouped_skinny(const MatmulTarget &target, const GroupedProblem &problem,
                                  int config);
cudaError_t launch_grouped_skinny(const MatmulTarget &target, const Int4GroupedProblem &problem,
                                  int config);

// Loads the skinny kernels, which may then use all the shared memory of a CTA.
cudaError_t allow_grouped_skinny(const GpuFamily &family, const Device &device);

// ---- Multistage kernels --------------------------------------------------------------------

cudaError_t launch_grouped_multistage(const MatmulTarget &target, const GroupedProblem &problem,
                                      int config);
cudaError_t load_grouped_multistage_kernels(const GpuFamily &family, const Device &device);

}  // namespace nf4::cuda
