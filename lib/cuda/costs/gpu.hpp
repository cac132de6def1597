// The estimated times of a product on the GPU of a launch, from the costs that apply to this GPU.
#pragma once

#include "cuda/costs/costs.hpp"
#include "cuda/runtime/target.hpp"

namespace nf4::cuda {

// Fills in what costs are looked up by. Returns false where CUDA does not tell the GPU's name.
bool find_costed_gpu(const LaunchTarget &target, CostedGpu &gpu);

template <class Problem>
StrategyTimes times_on(const LaunchTarget &target, const Problem &problem) {
  CostedSize size;
  CostedGpu gpu;
  if (!have_costs() || !find_costed_size(problem, size) || !find_costed_gpu(target, gpu)) return {};
  return find_times(gpu, size);
}

}  // namespace nf4::cuda
