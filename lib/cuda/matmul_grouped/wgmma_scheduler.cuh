// The tile scheduler of grouped products, and x gathered by rows.
#pragma once

#include "cuda/matmul/wgmma/codebook.cuh"
#include "cuda/matmul/wgmma/scheduler.cuh"
#include "cuda/matmul_grouped/routing.cuh"
#include "cuda/matmul_grouped/wgmma_args.hpp"
#include "cuda/ptx/cp_async.cuh"

namespace nf4::cuda {
namespace {

// Tiles are numbered expert after expert; in one, those that share rows of the weight are
// neighbours. Each CTA takes every gridDim.x-th. Each thread walks over the experts by itself, with
// which it keeps up: single threads load x and the weight, and no memory holds a list of tiles.
template <class Tile, bool GathersX>
class GroupedScheduler {
 public:
  using Args = typename Tile::Args;
  static constexpr bool kStreamK = false;
  static constexpr bool kReadsMemory = true;
  static constexpr bool kGathersX = GathersX;

  __device__ __forceinline__ explicit GroupedScheduler(const Args &args)
      : args_(args), tile_(static_cast<int>(blockIdx.x)) {
    find_expert();
  }

  __device__ __forceinline__ bool is_valid() const { return expert_ < args_.groups.experts; }
  __device__ __forceinline__ WorkTile work_tile() const {
    const int chunks = m_tiles(), n_tile = tile_ / chunks;
    return {expert_ * args_.groups.expert_rows + n_tile * Tile::kTileN,
            first_row_ + (tile_ - n_tile * chunks) * Tile::kTileM,
            0,
            args_.k_tiles,
            true,
            static_cast<int>(blockIdx.x)};
  }
  __device__ __forceinline__ void advance() {
    tile_ += static_cast<int>(gridDim.x);
    find_expert();
  }

  __device__ __forceinline__ int64_t m_end(const WorkTile &) const { return end_row_; }
  __device__ __forceinline__ int64_t n_end(const WorkTile &) const {
    return int64_t{expert_ + 1} * args_.groups.expert_rows;
  }
  __device__ __forceinline__ int64_t y_offset() const {
    return -int64_t{expert_} * args_.groups.expert_rows;
  }
  __device__ __forceinline__ int64_t bias_offset() const {
    return expert_ * args_.groups.bias_stride + y_offset();
  }
  __device__ __forceinline__ float row_scale(int row) const {
    const float *const scales = args_.groups.row_scale;
    return scales == nullptr || row >= end_row_ ? 1.0f : scales[row];
  }

 private:
  __device__ __forceinline__ int m_tiles() const {
    return (end_row_ - first_row_ + Tile::kTileM - 1) / Tile::kTileM;
  }
  // The expert that tile_ is of, counted from that expert's first tile.
  __device__ __forceinline__ void find_expert() {
#pragma unroll 1
    for (int tiles = m_tiles() * args_.expert_n_tiles; tile_ >= tiles && is_valid();
         tiles = m_tiles() * args_.expert_n_tiles) {
      tile_ -= tiles;
      first_row_ = end_row_;
      if (++expert_ < args_.groups.experts)
        end_row_ = max(first_row_, min(args_.groups.ends[expert_], args_.groups.rows));
    }
  }

  const Args &args_;
  int tile_;
  int expert_ = -1;
  int first_row_ = 0, end_row_ = 0;  // of y
};

// A weight with a codebook, in kernels whose tiles are GroupedScheduler's.
struct GroupedKind : CodebookKind<false> {
  using Args = GroupedWgmmaArgs;

  template <class Tile, class Scheduler>
  static __device__ __forceinline__ void load_scales(const Args &args, SharedStorage<Tile> shared,
                                                     int thread) {
    if (args.matmul.weight.nested_absmax != nullptr)
      nf4::cuda::load_scales<NestedScales, Tile, Scheduler>(args, shared, thread);
    else
      nf4::cuda::load_scales<FlatScales, Tile, Scheduler>(args, shared, thread);
  }

  // One warp, in place of load_x: rows of x by cp.async, in the swizzle that TMA would give them.
  // A step is published two steps later, when its copies are there, so that two more are in flight.
  template <class Tile, class Scheduler>
  static __device__ __forceinline__ void gather_x(const Args &args, SharedStorage<Tile> shared) {
    constexpr int kPending = 2;
    XPipelineState<Tile> load, publish;
    int steps = 0;
    const auto publish_next = [&] {
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads what was copied
      mbarrier_arrive_warp(shared.barrier(kXFull, publish.stage));
      publish.advance();
    };
    for_each_work_tile<Scheduler>(args, [&](const Scheduler &scheduler) {
      const WorkTile work = scheduler.work_tile();
      const int rows = static_cast<int>(scheduler.m_end(work)) - work.m;
      for (int step = 0; step < args.k_tiles * 2; ++step) {
        mbarrier_wait_parity(shared.barrier(kXEmpty, load.stage), load.phase ^ 1);
        copy_step<Tile>(args, work.m, rows, step * kStepK, shared.x(load.stage));
        cp_async_commit();
        load.advance();
        if (++steps > kPending) {
          cp_async_wait<kPending>();
          publish_next();
        }
      }
    });
    cp_async_wait_all();
    for (steps = min(steps, kPending); steps > 0; --steps) publish_next();
  }

 private:
  // 64 columns of a tile's rows of x; zeros for rows and columns that do not exist.
  template <class Tile>
  static __device__ __forceinline__ void copy_step(const Args &args, int first_row, int rows,
                                                   int first_column, uint8_t *to) {
    constexpr int kRowChunks = kStepK / 8, kRowStep = 32 / kRowChunks;
    const int chunk = static_cast<int>(threadIdx.x) % kRowChunks;
    const int column = first_column + chunk * 8;
    const auto *const x = static_cast<const uint16_t *>(args.matmul.x);
#pragma unroll 8
    for (int row = static_cast<int>(threadIdx.x % 32) / kRowChunks; row < Tile::kTileM;
         row += kRowStep) {
      const int64_t x_row =
          row < rows ? x_row_of(args.groups, args.matmul.m, first_row + row) : args.matmul.m;
      const bool exists = x_row < args.matmul.m && column < args.matmul.weight.cols;
      cp_async_16(to + row * (kStepK * 2) + (chunk ^ row % 8) * 16,
                  x + (exists ? x_row * args.matmul.x_stride + column : 0), exists ? 16 : 0);
    }
  }
};

}  // namespace
}  // namespace nf4::cuda
