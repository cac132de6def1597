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
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
  return address;
}

__device__ __forceinline__ void store_in_cluster(uint32_t address, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

}  // namespace nf4::cuda
