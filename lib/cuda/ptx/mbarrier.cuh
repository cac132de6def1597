// mbarrier and named barriers (PTX ISA, "Parallel Synchronization and Communication Instructions").
// The transaction count of an mbarrier needs compute capability 9.0.
#pragma once

#include <cstdint>

#include "cuda/ptx/shared_address.cuh"

namespace nf4::cuda {

// A fence and a barrier of the CTA must follow before other threads use it.
__device__ __forceinline__ void mbarrier_init(uint64_t *barrier, uint32_t arrivals = 1) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and adds `bytes` to what the phase waits for.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t *barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t *barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// The arrivals of a warp in mbarrier_arrive_warp: one, after __syncwarp. Racecheck does not see the
// order that __syncwarp creates, so every lane arrives in a build for it.
#ifdef NF4_RACECHECK
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif
__device__ __forceinline__ void mbarrier_arrive_warp(uint64_t *barrier) {
  __syncwarp();
  if (threadIdx.x % 32 < kWarpArrivals) mbarrier_arrive(barrier);
}

// Returns when the phase of this parity is complete.
__device__ __forceinline__ void mbarrier_wait_parity(uint64_t *barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// bar.sync over `threads` threads, in whole warps; barrier 0 is the barrier of __syncthreads.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The same; returns whether `mine` is true for any of them.
__device__ __forceinline__ bool named_barrier_or(int barrier, int threads, bool mine) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "barrier.red.or.pred p, %1, %2, p;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(static_cast<uint32_t>(mine))
      : "memory");
  return any != 0;
}

}  // namespace nf4::cuda
