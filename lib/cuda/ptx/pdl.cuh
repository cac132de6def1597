// Programmatic dependent launch (CUDA C++ Programming Guide): a kernel launched with it may start
// while its predecessor ends, and must wait before it touches memory. In other launches these
// functions have no effect.
#pragma once

namespace nf4::cuda {

template <class Arch>
__device__ __forceinline__ void pdl_wait() {
  if constexpr (Arch::kDependentLaunch) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Takes the place of pdl_wait for memory that the predecessor only reads, if the predecessor starts
// its dependents after its own pdl_wait. The output of the kernel before the predecessor is then in
// L2, but L1 may hold older data.
template <class Arch>
__device__ __forceinline__ void pdl_wait_for_earlier() {
  if constexpr (Arch::kDependentLaunch) __threadfence();
}

// The dependent grid starts once every CTA has called this or ended.
template <class Arch>
__device__ __forceinline__ void pdl_launch_dependents() {
  if constexpr (Arch::kDependentLaunch) asm volatile("griddepcontrol.launch_dependents;");
}

}  // namespace nf4::cuda
