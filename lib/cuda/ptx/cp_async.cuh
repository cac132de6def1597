// Asynchronous copies from global to shared memory (PTX ISA, "cp.async"). Compute capability 8.0.
#pragma once

#include <cstdint>

#include "cuda/ptx/shared_address.cuh"

namespace nf4::cuda {

// Copies 16 bytes, bypassing L1: reads the first `bytes` and fills the rest with 0.
__device__ __forceinline__ void cp_async_16(void *to, const void *from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes)
               : "memory");
}

// Copies 4 or 8 bytes through L1.
template <int Bytes>
__device__ __forceinline__ void cp_async_small(void *to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
               "n"(Bytes)
               : "memory");
}
__device__ __forceinline__ void cp_async_4(void *to, const void *from) {
  cp_async_small<4>(to, from);
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but the latest Pending groups of this thread are complete.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Arrives at an mbarrier once all copies of this thread are complete, without waiting here.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint64_t *barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

}  // namespace nf4::cuda
