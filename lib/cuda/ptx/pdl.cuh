// Programmatic dependent launch (CUDA C++ Programming Guide): a kernel launched with it may start
// while its predecessor ends, and must wait before it touches memory. No effect otherwise.
#pragma once

namespace nf4::cuda {

template <class Arch>
__device__ __forceinline__ void pdl_wait() {
  if constexpr (Arch::kDependentLaunch) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// In place of pdl_wait, for memory that the predecessor only reads, if it starts its dependents
// after its own pdl_wait: what its predecessor wrote is in L2 then, but L1 may hold what was there
// before.
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
