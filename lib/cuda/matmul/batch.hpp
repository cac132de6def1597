// The launches of several products: those that are alike go together as far as they fit.
#pragma once

#include "cuda/matmul/kernels.hpp"
#include "cuda/matmul/skinny/launch.hpp"
#include "cuda/runtime/families.hpp"

namespace nf4::cuda {

// The kernel of a configuration for several weights in one launch; NULL if there is none.
inline const void *batch_kernel(const GpuFamily &family, const MatmulProblem &problem, int config) {
  if (config >= kFamilyConfigCount) return nullptr;
  const auto &kernels = kernels_of<MatmulKernels>(family).batch;
  return kernels[problem.dtype - NF4_DTYPE_FP16][problem.weight.nested()][config];
}

// Walks through the launches. Products that write nothing are skipped.
class BatchLaunches {
 public:
  BatchLaunches(const MatmulTarget &target, const MatmulProblem *problems, int count)
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
  SkinnyBatchProblems next_launch() {
    SkinnyBatchProblems launch;
    for (int i = first_; i < count_; ++i) {
      if (!pending_[i] || (i != first_ && !joins(launch, i))) continue;
      launch.list[launch.count++] = problems_ + i;
      pending_[i] = false;
    }
    return launch;
  }

 private:
  bool joins(const SkinnyBatchProblems &launch, int i) const {
    const MatmulProblem &first = problems_[first_], &problem = problems_[i];
    return choices_[i].config == choices_[first_].config && problem.dtype == first.dtype &&
           problem.weight.nested() == first.weight.nested() &&
           batch_kernel(*target_.family, first, choices_[first_].config) != nullptr &&
           joins_launch(launch, problem, target_.gpu);
  }

  const MatmulTarget &target_;
  const MatmulProblem *problems_;
  int count_;
  int first_ = 0;
  bool pending_[NF4_MATMUL_BATCH_MAX];
  MatmulChoice choices_[NF4_MATMUL_BATCH_MAX];
};

}  // namespace nf4::cuda
