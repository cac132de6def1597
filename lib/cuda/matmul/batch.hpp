// The launches of several products. Products of the same kind share a launch as far as they fit.
#pragma once

#include "cuda/matmul/launch.hpp"

namespace nf4::cuda {

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
      const void *const kernel = batch_kernel_for(target_, first, config);
      return first.lora.rank == 0 && problem.lora.rank == 0 && choices_[i].config == config &&
             kernel != nullptr && kernel == batch_kernel_for(target_, problem, config) &&
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
