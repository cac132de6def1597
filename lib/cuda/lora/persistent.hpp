// The launch of x A^T on a few multiprocessors.
#pragma once

#include "cuda/lora/lora.hpp"

namespace nf4::cuda {

// For a plan of `ctas` persistent CTAs. `product`: its operands, and the CTAs that copy.
cudaError_t launch_persistent_lora(const LaunchTarget &target, const LoraProblem &problem,
                                   const LoraProductArgs &product, int ctas);

}  // namespace nf4::cuda
