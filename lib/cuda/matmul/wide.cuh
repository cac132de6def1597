// y = x W^T for many rows of x on Hopper: wgmma with the weight as A, from registers, and x as
// B, in shared memory.
//
// A thread block has one multiprocessor and goes through tiles of y. Its first warpgroup brings
// what the others multiply (wide_producers.cuh): one thread x, by steps of 64 columns, one
// thread the weight's bytes, by slabs of 128 columns, and two warps the scales of the slabs.
// Each other warpgroup multiplies 64 rows of the weight: a lane of a quad uses byte lane % 4 of
// each word of a row, which is the order in which wgmma wants A, and looks two weights up in a
// table. In tiles of up to 64 rows of x those are entries of the codebook, and the sums of each
// step are multiplied by its scale (wide_scaled_sums.cuh); in wider ones, whose sums fill the
// registers, the weights are (wide_scaled_weights.cuh). While the tensor cores work on one step the
// threads decode the next. Where tiles are few, clusters split their columns, and add up through
// each other's shared memory in a fixed order. Where tiles do not fill the last turn, kernels of
// their own (kStream...) share them among all blocks, and add up through L2, in a fixed order too.
//
// What bounds it: in tiles of up to 128 rows of x the path to shared memory, as follows. In
// tiles of 256 what a warpgroup does between two products, about 1200 cycles a step where the two
// warpgroups' products take 1024. At more than about 1000 rows of x, power too: 1.55 GHz at 663 W
// (dense: 1.44 GHz at 728 W). At few, start and end: 10000 of 40000 cycles at 64.
//
// Cycles of shared memory for a warp's 16 rows in a step: 16 look-ups, 8 for the bytes (a quad
// reads the same 16, which packs two registers of the four into one cycle), 1 for the scales, and
// for N rows of x N / 4, a quarter of what its warpgroup's products read. Beside them a block's
// copies write N for x, rows / 4 for the weight and rows / 32 for its scales. A slab of two steps:
//   tile (x by rows)            16x256  32x256  64x256  64x128  128x128  256x128
//   shared memory                 1100    1260    1580     860     1240     2010
//   tensor cores                   256     512    1024     512     1024     2048
//   instructions of a scheduler:
//     scales on the weights       1352    1352    1352     664      676      696
//     scales on the sums           732     828    1064     462      590
//   measured, on the weights              1650    1950    1175     1590     2290
//     on the sums                 1200    1440    2040    1065     1670
//   What was measured on the weights differs between shapes as shared memory's cycles do, and is
//   280 to 390 more. In tiles of 32 a decoding by 4 instructions in place of 7 took 300 of those
//   away, in tiles of 64x128 about 40: there are two warps for a scheduler, and latency takes the
//   rest. Scales on the sums were predicted at 1180, 1320, 1680, 1090 and 1530; tiles of
//   64x256 make their products by halves and wait for each. What tiles of 128 miss was not found.
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
//                        in halves (dense 154-166), which shared tiles replaced
//    4096x4096, M = 64   18.0 in 16 clusters of 4 (tiles of 256 rows), 13.9 in 32 of 3 (of 128);
//                        22 to 26 where not all clusters run together; 19 for the latter on one
//                        of several H200, so the device is asked how many it holds
//   14336x4096, scales on the sums and a start that is 1500 cycles shorter (the table before the
//   predecessor is waited for, barriers by two threads, no cluster barrier, no divisions where x
//   is one tile, what comes after the first slab only when the first scales are there), with PDL:
//   M = 16 16.2 (kFew16 20.7), M = 32 23.7 -> 18.9, M = 64 25.3 -> 23.3 in tiles of 64x128 (25.1
//   of 64x256, which win where those would take two turns: 28672x8192 84.4 -> 78.6, 82.8), M = 128
//   32.0 -> 33.0 (dense 34.8; so there the weights are scaled). Predicted 16.5, 21.8, 25.0, 32.5
//   and 0.8 less. Columns of 14336 cost 300 cycles a slab more than these counts, whatever the
//   tile: 4096x14336, M = 32 27.2 -> 21.8, 64 31.1 -> 27.8.
//   Two sets of products, so that one is added up while the next is made: the compiler cannot
//   tell across a loop's end which of them are done, and serializes them all (C7514). One set
//   and the next step's operands while it is made: 64 of 4 warpgroups has no registers for that
//   (24 spilled), and makes its products by halves.
//   14336x4096, M = 272 68.8 -> 48.6, 300 68.8 -> 52.3 (dense 51.9), 777 165 -> 152 (dense 126) by
//                        tiles of 272 and 304, whose products are two of half the columns: there
//                        are as few turns as of tiles of 256, and more products for what is
//                        decoded. Of what 777 lacks, 15 % is the last turn, in which 72 of 132
//                        blocks work
//   Shared tiles, with PDL (before, dense): 14336x4096, M = 512 93 (97, 92), 777 140 (151, 128),
//   1024 192 (halves 190, dense 166); 28672x8192, M = 128 109 (127, 129), 256 174 (195, 190);
//   11008x4096, M = 128 26.8 (32.7, 26.8), 256 40.3 (44.0, 34.0), 1024 140 (149, 124). Predicted
//   6 us for the exchange. Sums of 256 columns take 2.5 us to leave and 3 to take, and one more
//   tile's start and end 2.8; there where power bounds, a full last turn is at a lower clock.
//   They have kernels of their own because a loop with whole and shared tiles is 1 to 3 % slower
//   for whole ones; and 10 % where one lane waits for a flag in place of all, as the compiler then
//   takes warps for parted and keeps what is the same for all lanes in registers of each. Sums that
//   are taken before the products instead of after (predicted 1.5 us less): the compiler
//   serializes all products (C7515). Clusters that add up through L2, too: 4096x4096, M = 256
//   23.5 -> 26.1, 512 29.2 -> 32.4 (predicted 18 and 28, from 12000 cycles for 96 KB by way of
//   each other's shared memory).
//   Lost, from 46.2 at M = 256 and 181 at 1024: no table, but entries from registers by three PRMT
//   for four bytes of them (predicted 13 % less, since the table takes 128 of the 1005 cycles that
//   shared memory is busy in a step): 53.6 and 221, by what the PRMT take, so two warps' decoding
//   is in the way of the products, and not shared memory; each of a step's products started as
//   soon as its weights are made (predicted that more of the decoding is hidden): 48.5 and 201.
//   Lost too: warpgroups that start their products by turns (named barriers; M = 256 49.7, M = 777
//   228 in place of 197: the compiler moves decoding between the barrier and the products); 128
//   rows of the weight in each of two warpgroups (M = 128 38.0 in place of 35.3); pairs of
//   blocks that get x by multicast (M = 4096 709 in place of 695); 256-byte promotion into L2
//   (none); groups of 2, 4 or 8 tiles of x (none, but 1 is best at M = 1024, where the weight
//   stays in L2).
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/matmul/wide_producers.cuh"
#include "cuda/matmul/wide_results.cuh"
#include "cuda/matmul/wide_scaled_sums.cuh"
#include "cuda/matmul/wide_scaled_weights.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace nf4::cuda {
namespace {

// Two threads of different warps, one for x.
template <class Tile>
__device__ __forceinline__ void init_barriers(WideShared<Tile> shared, bool of_x) {
  using Layout = WideLayout<Tile>;
  constexpr int kConsumers = Tile::kWarpgroups * 4 * kWarpArrivals;
  constexpr int kScalers = kScaleThreads / 32 * kWarpArrivals;
  const int slots = of_x ? Layout::kXSlots : Layout::kSlabSlots;
#pragma unroll
  for (int slot = 0; slot < kWideMaxSlots; ++slot) {
    if (slot >= slots) break;
    mbarrier_init(shared.barrier(of_x ? kXFull : kSlabFull, slot), of_x ? 1 : 1 + kScalers);
    mbarrier_init(shared.barrier(of_x ? kXEmpty : kSlabEmpty, slot), kConsumers);
  }
  if (of_x) mbarrier_init(shared.first_scales(), kScalers);
  fence_mbarrier_init();
}

// Registers of a thread: the launch gives all an equal share, of which the producers need few.
template <class Tile>
struct WideRegisters {
  static constexpr int kProducer = Tile::kWarpgroups == 2 ? 56 : 64;
  static constexpr int kConsumer = Tile::kWarpgroups == 2 ? 224 : 104;
};

// The table, from arguments as long as the predecessor may still write; a caller's codebook is
// waited for. Returns the unit of the sums.
template <class Weights, class Tile>
__device__ __forceinline__ float build_table(const WideArgs &wide, WideShared<Tile> shared) {
  constexpr int kThreads = 128 * Tile::kWarpgroups;
  if (wide.matmul.codebook != nullptr) pdl_wait<Sm90>();
  const float unit = Weights::template build<kThreads>(wide, shared.base, multiplier_index());
  pdl_wait<Sm90>();
  pdl_launch_dependents<Sm90>();
  named_barrier_sync(1, kThreads);
  return unit;
}

// Weights are CodebookEntries where sums are scaled.
template <class Weights, class Tile>
__global__ void __launch_bounds__(128 * (Tile::kWarpgroups + 1), 1)
    matmul_wide(const __grid_constant__ WideArgs wide) {
  using T = typename Weights::Element;
  using Consumer = std::conditional_t<Tile::kScaledSums, WideScaledSums<T, Tile>,
                                      WideScaledWeights<Weights, Tile>>;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  const WideShared<Tile> shared{dynamic};
  if (threadIdx.x == 0) init_barriers(shared, true);
  if (threadIdx.x == 32) init_barriers(shared, false);
  __syncthreads();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<WideRegisters<Tile>::kProducer>();
    feed(wide, shared);
    // As the consumers do when they add up.
    if (wide.splits > 1) {
      cluster_sync_relaxed();
      cluster_sync();
    }
  } else {
    setmaxnreg_inc<WideRegisters<Tile>::kConsumer>();
    WideResults<T, Tile> results(wide, shared, build_table<Weights>(wide, shared));
    Consumer consumer(shared);
    for (WideWalk<Tile> walk(wide); walk.more(); walk.advance()) {
      consumer.multiply(walk.place());
      results.write(walk.place(), consumer.sums());
    }
  }
}

}  // namespace
}  // namespace nf4::cuda
