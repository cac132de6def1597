// Addresses in the shared window, in the form that PTX instructions take.
#pragma once

#include <cstdint>

namespace nf4::cuda {

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace nf4::cuda
