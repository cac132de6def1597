// Copies from global to shared memory that no thread waits in: inline PTX (PTX ISA,
// "Asynchronous copy" and "mbarrier").
#pragma once

#include <cstdint>

namespace nf4::cuda {

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- Barriers that count bytes (compute capability 9.0) -----------------------------------

// For so many arrivals in each phase. A fence, then a barrier of the threads, must follow
// before others use it.
__device__ __forceinline__ void init_barrier(uint64_t *barrier, uint32_t arrivals = 1) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The arrival of this phase, which ends when so many bytes have come, too.
__device__ __forceinline__ void expect_bytes(uint64_t *barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void arrive(uint64_t *barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// How often a warp arrives: once, for all of its lanes have met. Racecheck follows each thread by
// itself and not what a warp's meeting orders, so in a build for it each lane arrives.
#ifdef NF4_RACECHECK
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif
__device__ __forceinline__ void arrive_as_warp(uint64_t *barrier) {
  __syncwarp();
  if (threadIdx.x % 32 < kWarpArrivals) arrive(barrier);
}

__device__ __forceinline__ void wait_for_phase(uint64_t *barrier, uint32_t parity) {
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

// A box of a 2-D tensor map at column x and row y; what is out of bounds becomes 0.
__device__ __forceinline__ void copy_box(void *to, const void *tensor_map, int x, int y,
                                         uint64_t *barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to)),
      "l"(tensor_map), "r"(x), "r"(y), "r"(shared_address(barrier))
      : "memory");
}

// Brings a tensor map, an argument of the kernel, to where copies look for it.
__device__ __forceinline__ void prefetch_tensor_map(const void *tensor_map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(tensor_map) : "memory");
}

// Asks L2 for a box.
__device__ __forceinline__ void prefetch_box(const void *tensor_map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(tensor_map),
               "r"(x), "r"(y)
               : "memory");
}

// A barrier of so many threads of the block, in whole warps; number 0 is __syncthreads'.
__device__ __forceinline__ void synchronize_threads(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ---- Copies in groups (compute capability 8.0) --------------------------------------------

// 16 bytes, of which `bytes` are read and the rest becomes 0.
__device__ __forceinline__ void copy_16(void *to, const void *from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes)
               : "memory");
}

// The same of 4 bytes.
__device__ __forceinline__ void copy_4(void *to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}

__device__ __forceinline__ void end_copy_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// All but the latest Pending groups of this thread are there.
template <int Pending>
__device__ __forceinline__ void wait_for_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// All copies of this thread are there.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// This thread's arrival at a barrier, which happens when all of its copies are there; the thread
// does not wait for that.
__device__ __forceinline__ void arrive_after_copies(uint64_t *barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

}  // namespace nf4::cuda
