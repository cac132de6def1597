// Programmatic dependent launch (CUDA C++ Programming Guide): a kernel launched with it may start
// while its predecessor ends, and must wait before it touches memory. No effect otherwise.
#pragma once

namespace nf4::cuda {

template <class Arch>
__device__ __forceinline__ void pdl_wait() {
  if constexpr (Arch::kDependentLaunch) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The dependent grid starts once every CTA has called this or ended.
template <class Arch>
__device__ __forceinline__ void pdl_launch_dependents() {
  if constexpr (Arch::kDependentLaunch) asm volatile("griddepcontrol.launch_dependents;");
}

}  // namespace nf4::cuda
