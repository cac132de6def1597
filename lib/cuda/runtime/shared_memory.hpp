// Dynamic shared memory beyond the default, which a device's context allows kernel by kernel.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/runtime/device.hpp"

namespace nf4::cuda {

// Allows what a CTA may have to all of `kernels`, once a context: a struct or array of nothing but
// pointers, of which some may be NULL, to kernels without static shared memory. `known` is theirs.
template <class Kernels>
cudaError_t allow_shared_memory(const Device &device, const Kernels &kernels, ContextFlag &known) {
  static_assert(std::is_standard_layout_v<Kernels> && sizeof kernels % sizeof(void *) == 0);
  if (known.has(device.index)) return cudaSuccess;
  const auto *const list = reinterpret_cast<const void *const *>(&kernels);
  for (size_t i = 0; i < sizeof kernels / sizeof *list; ++i) {
    if (list[i] == nullptr) continue;
    const cudaError_t error = cudaFuncSetAttribute(
        list[i], cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  known.set(device.index);
  return cudaSuccess;
}

}  // namespace nf4::cuda
