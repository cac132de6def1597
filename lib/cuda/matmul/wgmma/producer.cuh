// The producer warpgroup: one thread loads x by steps, one the weight by K-tiles, and two warps
// load its scales.
#pragma once

#include <cstdint>

#include "cuda/arch.cuh"
#include "cuda/matmul/wgmma/reduce_split.cuh"
#include "cuda/matmul/wgmma/scheduler.cuh"
#include "cuda/matmul/wgmma/shared.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/tma.cuh"

namespace nf4::cuda {
namespace {

// One thread calls it. Loads are answered in order, and the loads of scales are small, so
// everything past the first K-tile is loaded after the first scales.
template <class Tile, class Scheduler>
__device__ __forceinline__ void load_x(const typename Tile::Args &args,
                                       SharedStorage<Tile> shared) {
  using Smem = SharedLayout<Tile>;
  XPipelineState<Tile> state;
  int steps = 0;
  for_each_work_tile<Scheduler>(args, [&](const Scheduler &scheduler) {
    const WorkTile work = scheduler.work_tile();
    const auto load = [&](const TensorMap &map, int column_bytes) {
      uint64_t *const full = shared.barrier(kXFull, state.stage);
      mbarrier_wait_parity(shared.barrier(kXEmpty, state.stage), state.phase ^ 1);
      mbarrier_arrive_expect_tx(full, Smem::kXStageBytes);
      // The first time, the barrier is ready before this waits for the predecessor. If the
      // scheduler reads memory, it has waited before, and this returns at once.
      if (steps == 1) {
        begin_loads<typename Tile::Kind>(args);
        if constexpr (Scheduler::kStreamK && Tile::kSplitK)
          if (args.cluster_size > 1) SplitKReduction<Tile>::announce(args);
      }
      for (int row = 0; row < Tile::kTileM; row += Smem::kXBoxRows)
        tma_load_2d(shared.x(state.stage) + row * kStepK * 2, &map, column_bytes, work.m + row,
                    full);
      state.advance();
    };
    for (int step = work.k_tile * 2; step < work.k_tile_end * 2; ++step) {
      if (steps++ == 2) mbarrier_wait_parity(shared.first_scales(), 0);
      load(args.x_map, step * kStepK * 2);
    }
    if constexpr (Tile::Kind::kLora) {
      for (int i = 0; i < lora_k_tiles<Tile>(args, work); ++i) {
        pdl_wait<Sm90>();
        load(args.lora.product_map, i * kLoraTileK * 2);
      }
    }
  });
}

// One thread calls it; the order is the same.
template <class Tile, class Scheduler>
__device__ __forceinline__ void load_weight(const typename Tile::Args &args,
                                            SharedStorage<Tile> shared) {
  WeightPipelineState<Tile> state;
  int k_tiles = 0;
  for_each_work_tile<Scheduler>(args, [&](const Scheduler &scheduler) {
    const WorkTile work = scheduler.work_tile();
    const auto acquire = [&] {
      uint64_t *const full = shared.barrier(kWeightFull, state.stage);
      mbarrier_wait_parity(shared.barrier(kWeightEmpty, state.stage), state.phase ^ 1);
      mbarrier_arrive_expect_tx(full, SharedLayout<Tile>::kWeightStageBytes);
      if (k_tiles == 1) begin_loads<typename Tile::Kind>(args);
      return full;
    };
    for (int k_tile = work.k_tile; k_tile < work.k_tile_end; ++k_tile) {
      if (k_tiles++ == 1) mbarrier_wait_parity(shared.first_scales(), 0);
      uint64_t *const full = acquire();
      if constexpr (Scheduler::kAlongK)
        Tile::Layout::load_columns(shared.weight(state.stage), &args.weight_map,
                                   scheduler.first_column() + k_tile * kTileK, work.n, full);
      else
        Tile::Layout::load_tile(shared.weight(state.stage), &args.weight_map, k_tile, work.n, full);
      state.advance();
    }
    // B takes the place of a K-tile and has as many bytes.
    if constexpr (Tile::Kind::kLora) {
      for (int i = 0; i < lora_k_tiles<Tile>(args, work); ++i) {
        static_assert(SharedLayout<Tile>::kWeightStageBytes == Tile::kTileN * kLoraTileK * 2);
        pdl_wait<Sm90>();
        uint64_t *const full = acquire();
        tma_load_2d(shared.weight(state.stage), &args.lora.out_map, i * kLoraTileK * 2, work.n,
                    full);
        state.advance();
      }
    }
  });
}

// Prefetches the first K-tiles into L2, which is allowed while the predecessor still writes. More
// than this would delay the first small loads.
template <class Tile, class Scheduler>
__device__ __forceinline__ void prefetch_weight(const typename Tile::Args &args) {
  constexpr int kKTiles = (32 << 10) / SharedLayout<Tile>::kWeightStageBytes;
  const Scheduler scheduler(args);
  if (!scheduler.is_valid()) return;
  const WorkTile work = scheduler.work_tile();
  const int end = min(work.k_tile + kKTiles, work.k_tile_end);
  for (int k_tile = work.k_tile; k_tile < end; ++k_tile)
    Tile::Layout::prefetch_tile(&args.weight_map, k_tile, work.n);
}

template <class Tile, class Scheduler>
__device__ __forceinline__ void produce(const typename Tile::Args &args,
                                        SharedStorage<Tile> shared) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  // The work tiles are not known before this.
  if constexpr (Scheduler::kReadsMemory) wait_for_inputs<typename Tile::Kind>(args);
  // Each of them waits for the predecessor when it knows its loads.
  if (warp == 0 && lane == 0) load_x<Tile, Scheduler>(args, shared);
  if (warp == 1 && lane == 0) {
    prefetch_tensor_map(&args.weight_map);
    prefetch_tensor_map(&args.x_map);
    if constexpr (Tile::Kind::kGroups && !Scheduler::kReadsMemory)
      prefetch_weight<Tile, Scheduler>(args);
    load_weight<Tile, Scheduler>(args, shared);
  }
  if (warp >= 2)
    Tile::Kind::template load_scales<Tile, Scheduler>(args, shared,
                                                      static_cast<int>(threadIdx.x) - 64);
}

}  // namespace
}  // namespace nf4::cuda
