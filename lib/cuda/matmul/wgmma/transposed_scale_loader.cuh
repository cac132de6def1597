// The two producer warps that load the scales of W^T: of each of a K-tile's columns, one for each 64
// rows of the CTA tile. Neighbouring columns' lie a stored row apart.
#pragma once

#include <cstdint>

#include "cuda/matmul/wgmma/scale_loader.cuh"
#include "cuda/matmul/wgmma/scheduler.cuh"
#include "cuda/matmul/wgmma/shared.cuh"
#include "cuda/ptx/mbarrier.cuh"

namespace nf4::cuda {
namespace {

// The scales of two columns of each K-tile, kScaleThreads apart, K-tile by K-tile. Of each the first
// RowBlocks times 64 rows of the CTA tile. Blocks have 31 bits.
template <class Scales, int RowBlocks>
class ColumnScales {
 public:
  static constexpr int kColumns = kTileK / kScaleThreads;
  static constexpr int kRowBlocks = RowBlocks;
  using Fetched = typename Scales::Fetched[kColumns][RowBlocks];

  __device__ __forceinline__ ColumnScales(const WeightView &weight, int row, int column)
      : weight_(weight), left_(static_cast<int>(weight.cols) - column) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int64_t first = int64_t{column + i * kScaleThreads} * weight.rows + row;
      blocks_[i][0] = static_cast<int>(first >> weight.blocksize_log2);
#pragma unroll
      for (int b = 1; b < RowBlocks; ++b) {
        // Past the last row it is the last scale, of rows that are not stored.
        const int64_t rows = min(int64_t{b * 64}, weight.rows - 64 - row);
        blocks_[i][b] = static_cast<int>((first + rows) >> weight.blocksize_log2);
      }
    }
  }

  // The next K-tile's; past the last column nothing. A K-tile's columns are whole blocks, as rows
  // are multiples of 64.
  __device__ __forceinline__ void fetch(Fetched &to) {
    const int step = static_cast<int>(weight_.rows * kTileK >> weight_.blocksize_log2);
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
#pragma unroll
      for (int b = 0; b < RowBlocks; ++b) {
        if (i * kScaleThreads < left_)
          to[i][b] = Scales::template fetch<LoadGlobal>(weight_, blocks_[i][b]);
        blocks_[i][b] += step;
      }
    left_ -= kTileK;
  }

 private:
  const WeightView &weight_;
  int left_;  // columns
  int blocks_[kColumns][RowBlocks];
};

template <class Scales, class Tile>
class TransposedScaleLoader {
 public:
  __device__ __forceinline__ TransposedScaleLoader(const typename Tile::Args &args,
                                                   SharedStorage<Tile> shared, int thread)
      : weight_(args.matmul.weight),
        shared_(shared),
        thread_(thread),
        table_(weight_, shared.scale_code(), thread) {}

  __device__ __forceinline__ void load(const WorkTile &work) {
    Columns columns(weight_, work.n, work.k_tile * kTileK + thread_);
    typename Columns::Fetched fetched[kAhead];
    int left = work.k_tile_end - work.k_tile;  // to fetch
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (--left >= 0) columns.fetch(fetched[i]);
    table_.store(thread_);
#pragma unroll 1
    for (int k_tile = work.k_tile; k_tile < work.k_tile_end; k_tile += kAhead)
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (k_tile + i >= work.k_tile_end) break;
        store(k_tile + i, fetched[i]);
        if (--left >= 0) columns.fetch(fetched[i]);
      }
  }

 private:
  static constexpr int kRowBlocks = Tile::kTileN / 64;
  static constexpr int kAhead = 2;  // K-tiles between load and use
  using Columns = ColumnScales<Scales, kRowBlocks>;

  // 0 past the last column, where dY is 0.
  __device__ __forceinline__ void store(int k_tile, const typename Columns::Fetched &fetched) {
    mbarrier_wait_parity(shared_.barrier(kWeightEmpty, state_.stage), state_.phase ^ 1);
    float *const to = shared_.scales(state_.stage);
#pragma unroll
    for (int i = 0; i < Columns::kColumns; ++i) {
      const int column = thread_ + i * kScaleThreads;
      const bool exists = int64_t{k_tile} * kTileK + column < weight_.cols;
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b)
        to[b * kTileK + Tile::Layout::scale_index(column)] =
            exists ? Scales::finish(fetched[i][b], table_) : 0.0f;
    }
    mbarrier_arrive_warp(shared_.barrier(kWeightFull, state_.stage));
    if (first_) mbarrier_arrive_warp(shared_.first_scales());
    first_ = false;
    state_.advance();
  }

  const WeightView &weight_;
  const SharedStorage<Tile> shared_;
  const int thread_;
  LateScaleTable<Scales> table_;
  bool first_ = true;
  WeightPipelineState<Tile> state_;
};

template <class Scales, class Tile, class Scheduler>
__device__ __forceinline__ void load_transposed_scales(const typename Tile::Args &args,
                                                       SharedStorage<Tile> shared, int thread) {
  TransposedScaleLoader<Scales, Tile> loader(args, shared, thread);
  for_each_work_tile<Scheduler>(
      args, [&](const Scheduler &scheduler) { loader.load(scheduler.work_tile()); });
}

}  // namespace
}  // namespace nf4::cuda
