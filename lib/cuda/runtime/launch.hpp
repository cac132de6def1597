// Kernel launches.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace nf4::cuda {

// Loads kernels before their first launch; NULL entries are skipped. The device is current.
cudaError_t load_kernels(const void *const *kernels, int count);

// The same of an operation's kernels of a family: a struct of nothing but pointers.
template <class Kernels>
cudaError_t load_kernels(const Kernels &kernels) {
  static_assert(std::is_standard_layout_v<Kernels> && sizeof kernels % sizeof(void *) == 0);
  return load_kernels(reinterpret_cast<const void *const *>(&kernels),
                      int{sizeof kernels / sizeof(void *)});
}

struct Launch {
  const void *kernel;
  int64_t ctas;
  int threads;
  bool pdl;  // programmatic dependent launch: the kernel calls pdl_wait
  cudaStream_t stream;
  int shared_bytes = 0;  // dynamic
  int cluster = 1;       // CTAs of a cluster
};

// For tests and benchmarks: launches without PDL. Not thread safe.
void force_plain_launches(bool plain);

namespace detail {
cudaError_t launch(const Launch &launch, const void *args);
}

// Enqueues a kernel of one argument struct. The stream's device is current.
template <class Args>
cudaError_t launch(const Launch &launch, const Args &args) {
  return detail::launch(launch, &args);
}

}  // namespace nf4::cuda
