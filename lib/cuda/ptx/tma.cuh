// Tensor copies, TMA (PTX ISA, "cp.async.bulk.tensor"). Compute capability 9.0.
#pragma once

#include <cstdint>

#include "cuda/ptx/shared_address.cuh"

namespace nf4::cuda {

// Copies the tensor map's box at column x, row y; elements out of bounds become 0. The barrier
// counts its bytes.
__device__ __forceinline__ void tma_load_2d(void *to, const void *tensor_map, int x, int y,
                                            uint64_t *barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to)),
      "l"(tensor_map), "r"(x), "r"(y), "r"(shared_address(barrier))
      : "memory");
}

// Prefetches the box into L2.
__device__ __forceinline__ void tma_prefetch_2d(const void *tensor_map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(tensor_map),
               "r"(x), "r"(y)
               : "memory");
}

// Prefetches a tensor map that is a kernel parameter.
__device__ __forceinline__ void prefetch_tensor_map(const void *tensor_map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(tensor_map) : "memory");
}

}  // namespace nf4::cuda
