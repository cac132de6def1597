// y = x W^T for many rows of x on Hopper: wgmma with the weight as A, from registers, and x as
// B, in shared memory.
//
// A thread block has one multiprocessor and goes through tiles of y. Its first warpgroup brings
// what the others multiply (wide_producers.cuh): one thread x, by steps of 64 columns, one
// thread the weight's bytes, by slabs of 128 columns, and two warps the scales of the slabs.
// Each other warpgroup multiplies 64 rows of the weight (wide_consumer.cuh): a lane of a quad
// uses byte lane % 4 of each word of a row, which is the order in which wgmma wants A, looks two
// weights up in a table and multiplies them with their scale (wide_weights.cuh). While the
// tensor cores work on one step the threads decode the next. Where tiles are few, clusters
// split their columns, and add up through each other's shared memory in a fixed order.
//
// What bounds it: what a warpgroup does between two products, about 1200 cycles a step for
// tiles of 256 rows of x, where the two warpgroups' products take 1024. At more than about
// 1000 rows of x, power too: 1.55 GHz at 663 W (dense: 1.44 GHz at 728 W). At few, start and end:
// 10000 of 40000 cycles at 64.
//
// Log, bf16 nested on an H200, us (dense: cuBLAS on a bf16 weight, in the same turns):
//   14336x4096, M = 256  47.0 (dense 44.8)  a table of bf16 and a scale that is the sum of two
//                                     numbers of 16 bits: 4 instructions for two weights; scales
//                                     by steps, each from its own loads
//                        48.4 (44.5)  the same as dequantize rounds (NearWeights), which is
//                                     7 instructions; scales in groups: predicted 46, decoding
//                                     bounds it
//                        53.0 (44.5)  a table of binary32 (ExactWeights): 5 instructions, but
//                                     look-ups of 8 bytes, which take shared memory's time
//                        45.0 (44.8)  without decoding and scales, for comparison
//                        46.0 (43.3)  the first again, scales split by the producers, the next
//                                     step's bytes asked for before the products start
//   The scale in two numbers is not used: its error is 1.08 to 1.13 of what dequantize's weights
//   have, and 1.3 where x has a mean as large as its deviation. What follows was measured with it.
//   14336x4096, M = 128  35.1 -> 31.7, 64: 26.7 -> 24.4, 32: 22.3 -> 20.5 (with PDL) by the
//                        latter two (predicted 1 less)
//   14336x4096, M = 1024 208 in four turns of the blocks, 170-187 with the last turn's tiles
//                        in halves (dense 154-166)
//    4096x4096, M = 64   18.0 in 16 clusters of 4 (tiles of 256 rows), 13.9 in 32 of 3 (of 128);
//                        22 to 26 where not all clusters run together; 19 for the latter on one
//                        of several H200, so the device is asked how many it holds
//   Lost: warpgroups that start their products by turns (named barriers; M = 256 49.7, M = 777
//   228 in place of 197: the compiler moves decoding between the barrier and the products); 128
//   rows of the weight in each of two warpgroups (M = 128 38.0 in place of 35.3); pairs of
//   blocks that get x by multicast (M = 4096 709 in place of 695); 256-byte promotion into L2
//   (none); groups of 2, 4 or 8 tiles of x (none, but 1 is best at M = 1024, where the weight
//   stays in L2).
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
__device__ __forceinline__ void init_barriers(WideShared<Tile> shared) {
  constexpr int kConsumerWarps = Tile::kWarpgroups * 4;
  for (int slot = 0; slot < kWideMaxSlots; ++slot) {
    init_barrier(shared.barrier(kXFull, slot));
    init_barrier(shared.barrier(kXEmpty, slot), kConsumerWarps);
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
  const bool together = wide.splits > 1;
  if (threadIdx.x == 0) init_barriers(shared);
  if (threadIdx.x == 32) prefetch_slabs<Tile>(wide);
  __syncthreads();
  if (together) meet_cluster();
  wait_for_predecessor<Sm90>();
  start_dependents<Sm90>();
  if (threadIdx.x < 128) {
    give_registers<WideRegisters<Tile>::kProducer>();
    feed<Weights>(wide, shared);
    // As the consumers do when they add up.
    if (together) meet_cluster();
    if (together) synchronize_cluster();
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
  }
}

}  // namespace
}  // namespace nf4::cuda
