// y = x W^T for many rows of x on Hopper.
#pragma once

#include <cuda_runtime.h>

#include "cuda/cluster.cuh"
#include "cuda/matmul/wide_consumer.cuh"
#include "cuda/matmul/wide_producers.cuh"
#include "cuda/memory.cuh"
#include "cuda/wgmma.cuh"

namespace nf4::cuda {
namespace {

template <class Tile>
__device__ __forceinline__ void init_barriers(const WideArgs &wide, WideShared<Tile> shared) {
  constexpr int kConsumerWarps = Tile::kWarpgroups * 4;
  for (int slot = 0; slot < kWideMaxSlots; ++slot) {
    init_barrier(shared.barrier(kXFull, slot));
    init_barrier(shared.barrier(kXEmpty, slot), kConsumerWarps * wide.pair);
    init_barrier(shared.barrier(kSlabFull, slot), 1 + kScaleThreads / 32);
    init_barrier(shared.barrier(kSlabEmpty, slot), kConsumerWarps);
  }
  fence_barrier_init();
}

// Registers of a thread: the launch gives all an equal share, of which the producers need few.
template <class Tile>
struct WideRegisters {
  static constexpr int kProducer = Tile::kWarpgroups == 2 ? 56 : 64;
  static constexpr int kConsumer = Tile::kWarpgroups == 2 ? 224 : 104;
};

template <class Weights, class Tile>
__global__ void __launch_bounds__(128 * (Tile::kWarpgroups + 1), 1)
    matmul_wide(const __grid_constant__ WideArgs wide) {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  const WideShared<Tile> shared{dynamic};
  const bool together = wide.pair * wide.splits > 1;
  if (threadIdx.x == 0) init_barriers(wide, shared);
  if (threadIdx.x == 32) prefetch_slabs<Tile>(wide);
  __syncthreads();
  if (together) meet_cluster();
  wait_for_predecessor<Sm90>();
  start_dependents<Sm90>();
  if (threadIdx.x < 128) {
    give_registers<WideRegisters<Tile>::kProducer>();
    feed(wide, shared);
    // The consumers' meetings.
    if (together) meet_cluster();
    if (wide.splits > 1) synchronize_cluster();
  } else {
    take_registers<WideRegisters<Tile>::kConsumer>();
    using Consumer = WideConsumer<Weights, Tile>;
    const float factor = Weights::template build<Consumer::kThreads>(
        wide, dynamic, static_cast<int>(threadIdx.x) - 128);
    synchronize_threads(1, Consumer::kThreads);
    Consumer consumer(wide, shared, factor);
    each_whole_tile<Tile>(wide, [&](const WidePlace &place) {
      consumer.template multiply<Tile::kColumns>(place);
      consumer.template finish<Tile::kColumns>(place);
    });
    // In a loop of its own: products of two widths in one would wait for each other.
    if constexpr (Tile::kHalves)
      each_half_tile<Tile>(wide, [&](const WidePlace &place) {
        consumer.template multiply<Tile::kColumns / 2>(place);
        consumer.template finish<Tile::kColumns / 2>(place);
      });
    // A block of a pair must not end before the other has done with its barriers.
    if (wide.pair > 1) meet_cluster();
  }
}

}  // namespace
}  // namespace nf4::cuda
