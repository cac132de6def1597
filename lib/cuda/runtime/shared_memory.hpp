// Dynamic shared memory beyond the default, which a device's context allows kernel by kernel.
#pragma once

#include <cuda_runtime.h>

#include <iterator>
#include <type_traits>

#include "cuda/runtime/device.hpp"
#include "cuda/runtime/families.hpp"

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

template <class Kernels, class Part>
Kernels table_of_part(Part Kernels::*);

// The same for a part of a family's table of kernels, such as &MatmulKernels::skinny.
template <auto Part>
cudaError_t allow_shared_memory(const GpuFamily &family, const Device &device) {
  using Kernels = decltype(table_of_part(Part));
  static ContextFlag known[std::size(kGpuFamilies)];
  return allow_shared_memory(device, kernels_of<Kernels>(family).*Part,
                             known[&family - kGpuFamilies]);
}

}  // namespace nf4::cuda
