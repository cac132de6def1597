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
  // Walks on to the expert that tile_ is of, and counts it from that expert's first tile. Several
  // ends are loaded at once, as each takes long.
  __device__ __forceinline__ void find_expert() {
    constexpr int kEnds = 8;
    const Groups &groups = args_.groups;
    while (true) {
      int ends[kEnds];
#pragma unroll
      for (int i = 0; i < kEnds; ++i)
        ends[i] = groups.ends[min(expert_ + 1 + i, groups.experts - 1)];
#pragma unroll
      for (int i = 0; i < kEnds; ++i) {
        const int tiles = m_tiles() * args_.expert_n_tiles;
        if (tile_ < tiles || !is_valid()) return;
        tile_ -= tiles;
        ++expert_;
        first_row_ = end_row_;
        end_row_ = max(first_row_, min(ends[i], groups.rows));
      }
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
  // A step is published when the copies of several later ones are in flight. Consumers hold a
  // stage until the next one is there.
  template <class Tile, class Scheduler>
  static __device__ __forceinline__ void gather_x(const Args &args, SharedStorage<Tile> shared) {
    constexpr int kPending = SharedLayout<Tile>::kXStages - 2;
    XPipelineState<Tile> load, publish;
    int steps = 0;
    const auto publish_next = [&] {
      fence_async_proxy();  // wgmma reads what was copied
      mbarrier_arrive_warp(shared.barrier(kXFull, publish.stage));
      publish.advance();
    };
    for_each_work_tile<Scheduler>(args, [&](const Scheduler &scheduler) {
      const WorkTile work = scheduler.work_tile();
      const GatheredRows<Tile> rows(args, work.m, static_cast<int>(scheduler.m_end(work)));
      for (int step = 0; step < args.k_tiles * 2; ++step) {
        mbarrier_wait_parity(shared.barrier(kXEmpty, load.stage), load.phase ^ 1);
        rows.copy(step * kStepK, shared.x(load.stage));
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
  // A lane's part of a tile's rows of x: a chunk of 16 bytes of every fourth row. Where each row
  // is stays in registers if they are few.
  template <class Tile>
  class GatheredRows {
   public:
    __device__ __forceinline__ GatheredRows(const Args &args, int first_row, int end_row)
        : args_(args), first_row_(first_row), end_row_(end_row) {
      if constexpr (kKept)
#pragma unroll
        for (int i = 0; i < kRows; ++i) kept_[i] = find(i);
    }

    // 64 columns; zeros for rows and columns that do not exist.
    __device__ __forceinline__ void copy(int first_column, uint8_t *to) const {
      const int column = first_column + chunk() * 8;
      const auto *const x = static_cast<const uint16_t *>(args_.matmul.x) + column;
      const bool in_row = column < args_.matmul.weight.cols;
#pragma unroll kKept ? kRows : 4
      for (int i = 0; i < kRows; ++i) {
        const int x_row = kKept ? kept_[kKept ? i : 0] : find(i);
        const bool exists = in_row & (x_row >= 0);
        cp_async_16(to + row(i) * (kStepK * 2) + (chunk() ^ row(i) % 8) * 16,
                    exists ? x + x_row * args_.matmul.x_stride : args_.matmul.x, exists ? 16 : 0);
      }
    }

   private:
    static constexpr int kRowChunks = kStepK / 8, kRowStep = 32 / kRowChunks;
    static constexpr int kRows = Tile::kTileM / kRowStep;
    static constexpr bool kKept = kRows <= 16;

    static __device__ __forceinline__ int chunk() {
      return static_cast<int>(threadIdx.x) % kRowChunks;
    }
    static __device__ __forceinline__ int row(int i) {
      return static_cast<int>(threadIdx.x % 32) / kRowChunks + i * kRowStep;
    }
    // The row of x, or -1. The loads of all rows are independent of each other.
    __device__ __forceinline__ int find(int i) const {
      const int y_row = min(first_row_ + row(i), end_row_ - 1);
      const int x_row = args_.groups.x_index[y_row];
      return first_row_ + row(i) < end_row_ && x_row < args_.matmul.m ? x_row : -1;
    }

    const Args &args_;
    const int first_row_, end_row_;
    int kept_[kKept ? kRows : 1];
  };
};

}  // namespace
}  // namespace nf4::cuda
