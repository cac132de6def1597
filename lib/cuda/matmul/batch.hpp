// The launches of several products: those that are alike go together as far as they fit.
#pragma once

#include "cuda/matmul/kernels.hpp"
#include "cuda/matmul/skinny/launch.hpp"
#include "cuda/runtime/families.hpp"

namespace nf4::cuda {

// The kernel of a configuration for several weights in one launch; NULL if there is none.
inline const void *batch_kernel(const MatmulProblem &problem, const GpuFamily &family, int config) {
  if (config >= kFamilyConfigCount) return nullptr;
  return kernels_of<MatmulKernels>(family)
      .batch[problem.dtype - NF4_DTYPE_FP16][problem.weight.nested()][config];
}

// Walks through the launches. Products that write nothing are skipped.
class BatchLaunches {
 public:
  BatchLaunches(const MatmulProblem *problems, int count, const GpuFamily &family,
                const Device &device)
      : problems_(problems), count_(count), family_(family), device_(device) {}

  // First of all: choose(problem, config) fills in each product's configuration.
  template <class Choose>
  cudaError_t choose_configs(Choose choose) {
    for (int i = 0; i < count_; ++i) {
      pending_[i] = !problems_[i].empty();
      if (!pending_[i]) continue;
      const cudaError_t error = choose(problems_[i], configs_[i]);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

  bool is_valid() {
    while (first_ < count_ && !pending_[first_]) ++first_;
    return first_ < count_;
  }
  int config() const { return configs_[first_]; }

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
    return configs_[i] == configs_[first_] && problem.dtype == first.dtype &&
           problem.weight.nested() == first.weight.nested() &&
           batch_kernel(first, family_, configs_[first_]) != nullptr &&
           joins_launch(launch, problem, device_);
  }

  const MatmulProblem *problems_;
  int count_;
  const GpuFamily &family_;
  const Device &device_;
  int first_ = 0;
  bool pending_[NF4_MATMUL_BATCH_MAX];
  int configs_[NF4_MATMUL_BATCH_MAX];
};

}  // namespace nf4::cuda
