// Launches of x A^T with TMA: lora_product_persistent and lora_product_wide, for Hopper.
#pragma once

#include "cuda/lora/lora.hpp"

namespace nf4::cuda {

// For a plan with `ctas` persistent CTAs. `product` has its operands, and the CTAs that copy.
cudaError_t launch_persistent_lora(const LaunchTarget &target, const LoraProblem &problem,
                                   const LoraProductArgs &product, int ctas);

// can_run_wide_lora tells whether the kernels for more than 16 ranks can run; launch_wide_lora
// enqueues them on all multiprocessors.
bool can_run_wide_lora(const LaunchTarget &target, const LoraProblem &problem);
cudaError_t launch_wide_lora(const LaunchTarget &target, const LoraProblem &problem,
                             const LoraProductArgs &product);

}  // namespace nf4::cuda
