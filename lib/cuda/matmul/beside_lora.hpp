// What a wgmma kernel has of a GPU while the product of an adapter runs beside it.
#pragma once

#include "cuda/lora/lora.hpp"
#include "cuda/matmul/choose.hpp"

namespace nf4::cuda {

template <class Problem>
void leave_to_lora(const Device &device, const Problem &problem, GpuFacts &gpu) {
  if (problem.lora.rank == 0) return;
  const LoraPlan plan = plan_lora(device, LoraProblem(problem));
  if (plan.leaves_multiprocessors) leave_multiprocessors(plan.persistent_ctas, gpu);
}

}  // namespace nf4::cuda
