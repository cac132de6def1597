// The launch of x A^T on a few multiprocessors.
#pragma once

#include "cuda/lora/lora.hpp"

namespace nf4::cuda {

// Whether rows of a matrix are on 16 bytes.
inline bool has_vectors(const void *data, int64_t stride, nf4_dtype dtype) {
  return is_multiple(data, 16) && stride * element_bytes(dtype) % 16 == 0;
}

// As plan_lora allows; `product` with what is copied.
cudaError_t launch_persistent_lora(const LaunchTarget &target, const LoraProblem &problem,
                                   const LoraProductArgs &product, int ctas);

}  // namespace nf4::cuda
