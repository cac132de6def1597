// Thread blocks of a cluster, which reach each other's shared memory: inline PTX (PTX ISA,
// "Cluster"). Compute capability 9.0.
#pragma once

#include <cstdint>

#include "cuda/async.cuh"

namespace nf4::cuda {

// Of this thread block in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster arrive. What they wrote before is seen after.
__device__ __forceinline__ void synchronize_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// The same, but for writes, which nobody waits for.
__device__ __forceinline__ void meet_cluster() {
  asm volatile(
      "barrier.cluster.arrive.relaxed;\n"
      "barrier.cluster.wait;" ::
          : "memory");
}

// The address of another block's shared memory at the same place.
__device__ __forceinline__ uint32_t address_in_cluster(const void *own, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(own)), "r"(rank));
  return address;
}

__device__ __forceinline__ void store_in_cluster(uint32_t address, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// Arrives at a barrier of any block of the cluster. It orders this thread's reads no further
// than its own block: a release at cluster scope would wait for all its stores.
__device__ __forceinline__ void arrive_in_cluster(uint32_t barrier_address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier_address) : "memory");
}

// copy_box into the blocks of `mask`, at the same place in each, where it completes on the
// barrier at the same place.
__device__ __forceinline__ void copy_box_to_cluster(void *to, const void *tensor_map, int x, int y,
                                                    uint64_t *barrier, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(tensor_map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(mask)
      : "memory");
}

}  // namespace nf4::cuda
