// The launches of several products: those that are alike go together as far as they fit.
#pragma once

#include <type_traits>

#include "cuda/matmul/kernels.hpp"
#include "cuda/matmul/mma/launch.hpp"
#include "cuda/matmul/skinny/launch.hpp"
#include "cuda/runtime/families.hpp"

namespace nf4::cuda {

inline const void *kernel_for(const GpuFamily &family, const MatmulProblem &problem, int config) {
  // A weight without elements has no scales, of either kind.
  const bool nested = problem.weight.nested() && problem.weight.elements != 0;
  const MatmulKernels &kernels = kernels_of<MatmulKernels>(family);
  const bool lora = problem.lora.rank > 0 && is_skinny(config);
  return (lora ? kernels.lora : kernels.of)[problem.dtype - NF4_DTYPE_FP32][nested][config];
}
inline const void *kernel_for(const GpuFamily &family, const Int4MatmulProblem &problem,
                              int config) {
  const Int4Weight &weight = problem.weight;
  return kernels_of<Int4MatmulKernels>(family)
      .of[problem.dtype - NF4_DTYPE_FP16][weight.layout - NF4_INT4_GPTQ][weight.g_idx != nullptr]
         [config];
}

// kMma64x64 for few rows of x; NULL if the problem has more, or the family has none.
inline const void *mma_few_for(const GpuFamily &family, const Int4MatmulProblem &problem) {
  const Int4Weight &weight = problem.weight;
  if (problem.m > kFewRowsOfX) return nullptr;
  return kernels_of<Int4FewKernels>(family)
      .of[problem.dtype - NF4_DTYPE_FP16][weight.layout - NF4_INT4_GPTQ][weight.g_idx != nullptr];
}

// Whether there are skinny kernels for several weights in one launch.
template <class W>
constexpr bool kHasSkinnyBatch = std::is_same_v<W, Weight>;

// The kernel of a configuration for several weights in one launch; NULL if there is none.
inline const void *batch_kernel_for(const GpuFamily &family, const MatmulProblem &problem,
                                    int config) {
  if (config >= kFamilyConfigCount) return nullptr;
  const auto &kernels = kernels_of<MatmulKernels>(family).batch;
  return kernels[problem.dtype - NF4_DTYPE_FP32][problem.weight.nested()][config];
}

// Walks through the launches. Products that write nothing are skipped.
template <class W>
class BatchLaunches {
 public:
  BatchLaunches(const MatmulTarget &target, const MatmulProblemOf<W> *problems, int count)
      : target_(target), problems_(problems), count_(count) {}

  // First of all: choose(problem, choice) fills in each product's.
  template <class Choose>
  cudaError_t choose_configs(Choose choose) {
    for (int i = 0; i < count_; ++i) {
      pending_[i] = !problems_[i].empty();
      if (!pending_[i]) continue;
      const cudaError_t error = choose(problems_[i], choices_[i]);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

  bool is_valid() {
    while (first_ < count_ && !pending_[first_]) ++first_;
    return first_ < count_;
  }
  const MatmulChoice &choice() const { return choices_[first_]; }

  // The products of the next launch: the first that is pending, and those that go with it.
  SkinnyBatchProblems<W> next_launch() {
    SkinnyBatchProblems<W> launch;
    for (int i = first_; i < count_; ++i) {
      if (!pending_[i] || (i != first_ && !joins(launch, i))) continue;
      launch.list[launch.count++] = problems_ + i;
      pending_[i] = false;
    }
    return launch;
  }

 private:
  bool joins([[maybe_unused]] const SkinnyBatchProblems<W> &launch, [[maybe_unused]] int i) const {
    if constexpr (kHasSkinnyBatch<W>) {
      const MatmulProblemOf<W> &first = problems_[first_], &problem = problems_[i];
      const int config = choices_[first_].config;
      const void *const kernel = batch_kernel_for(*target_.family, first, config);
      return first.lora.rank == 0 && problem.lora.rank == 0 && choices_[i].config == config &&
             kernel != nullptr && kernel == batch_kernel_for(*target_.family, problem, config) &&
             joins_launch(launch, problem, target_.gpu);
    }
    return false;
  }

  const MatmulTarget &target_;
  const MatmulProblemOf<W> *problems_;
  int count_;
  int first_ = 0;
  bool pending_[NF4_MATMUL_BATCH_MAX];
  MatmulChoice choices_[NF4_MATMUL_BATCH_MAX];
};

}  // namespace nf4::cuda
