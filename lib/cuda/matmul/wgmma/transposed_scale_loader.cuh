// The two producer warps that load the scales of W^T. Each column of a K-tile has one for each 64
// rows of the CTA tile. The scales of neighbouring columns are a stored row apart.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/matmul/wgmma/scale_loader.cuh"
#include "cuda/matmul/wgmma/scheduler.cuh"
#include "cuda/matmul/wgmma/shared.cuh"
#include "cuda/ptx/mbarrier.cuh"

namespace nf4::cuda {
namespace {

// Whether the stage has scales in fp16. It does for tiles bound by the path to shared memory, which
// takes twice as long for scales in fp32. For other tiles the producers would be the bound.
template <class Tile>
constexpr bool kHasFp16Scales = Tile::kTileM > 128;

// The scales of a K-tile's columns, for the first and the second 64 rows (block) of the CTA tile.
// They are in fp32, and also in fp16 if weights computed from those are right to an eighth of their
// rounding to bf16.
struct TransposedScaleStage {
  static constexpr int kFloatsBytes = 2 * kTileK * 4;
  static constexpr int kPairsBytes = 2 * kTileK * 2;
  static constexpr int kBytes = kFloatsBytes + kPairsBytes + 16;
  float *base;

  // Columns 2t and 2t + 1 of a step; those of the next eight columns are four further on.
  __device__ __forceinline__ const float2 *floats(int block, int step, int t) const {
    return reinterpret_cast<const float2 *>(base) + (block * kTileK + step * kStepK) / 2 + t;
  }
  // Two vectors of a step: those with which a lane of t multiplies.
  __device__ __forceinline__ const uint4 *pairs(int block, int step, int t) const {
    return reinterpret_cast<const uint4 *>(base + kFloatsBytes / 4) +
           ((block * 2 + step) * 4 + t) * 2;
  }
  // Whether the scales in fp16 are precise enough; each of the loader's warps says so.
  __device__ __forceinline__ bool fp16() const {
    const uint2 right = *reinterpret_cast<const uint2 *>(base + (kFloatsBytes + kPairsBytes) / 4);
    return (right.x & right.y) != 0;
  }

  __device__ __forceinline__ void store(int column, float2 scales) const {
    base[column] = scales.x;
    base[kTileK + column] = scales.y;
  }
  __device__ __forceinline__ void store_fp16(int column, float2 scales) const {
    const int step = column / kStepK, eight = column % kStepK / 8, t = column % 8 / 2;
    const int half = ((step * 4 + t) * 8 + eight) * 2 + column % 2;
    auto *const halves = reinterpret_cast<__half *>(base + kFloatsBytes / 4);
    halves[half] = __float2half_rn(scales.x);
    halves[kTileK + half] = __float2half_rn(scales.y);
  }
  // `least` is the smallest scale whose products with a format's entries are not subnormal in fp16.
  static __device__ __forceinline__ bool is_right(float2 scales, float least) {
    constexpr float kMost = 0x1p15f;
    const float smaller = fminf(fabsf(scales.x), fabsf(scales.y));
    return smaller >= least && fabsf(scales.x) <= kMost && fabsf(scales.y) <= kMost;
  }
  static __device__ __forceinline__ float least_right(const float (&codebook)[kCodebookSize]) {
    float smallest = 1.0f;
#pragma unroll
    for (const float entry : codebook)
      if (entry != 0) smallest = fminf(smallest, fabsf(entry));
    return 0x1p-14f / smallest;
  }
  __device__ __forceinline__ void store_right(int warp, bool right) const {
    reinterpret_cast<uint32_t *>(base + (kFloatsBytes + kPairsBytes) / 4)[warp] = right;
  }
};

// The scales of a column's first and second 64 rows of a CTA tile, loaded separately: the second
// lies `distance` blocks further on.
template <class Scales>
struct SeparateScales {
  typename Scales::Fetched of[2];

  static __device__ __forceinline__ SeparateScales fetch(const WeightView &weight, int block,
                                                         int distance) {
    return {{Scales::template fetch<LoadGlobal>(weight, block),
             Scales::template fetch<LoadGlobal>(weight, block + distance)}};
  }
  template <class Table>
  __device__ __forceinline__ float2 finish(const Table &table) const {
    return {Scales::finish(of[0], table), Scales::finish(of[1], table)};
  }
};

// The same, loaded together: the second lies beside the first, aligned, and in the same nested
// block. Each load of a warp reads 32 lines, which occupies the path to shared memory as long as 32
// loads from shared memory.
template <class Scales>
struct PairedScales;
template <>
struct PairedScales<FlatScales> {
  float2 scales;

  static __device__ __forceinline__ PairedScales fetch(const WeightView &weight, int block, int) {
    return {LoadGlobal::load(
        reinterpret_cast<const float2 *>(static_cast<const float *>(weight.absmax) + block))};
  }
  template <class Table>
  __device__ __forceinline__ float2 finish(const Table &) const {
    return scales;
  }
};
template <>
struct PairedScales<NestedScales> {
  float absmax;
  uint32_t codes;

  static __device__ __forceinline__ PairedScales fetch(const WeightView &weight, int block, int) {
    return {LoadGlobal::load(weight.nested_absmax + (block >> weight.nested_blocksize_log2)),
            LoadGlobal::load(reinterpret_cast<const uint16_t *>(
                static_cast<const uint8_t *>(weight.absmax) + block))};
  }
  template <class Table>
  __device__ __forceinline__ float2 finish(const Table &table) const {
    return {NestedScales::finish({absmax, codes & 255u}, table),
            NestedScales::finish({absmax, codes >> 8}, table)};
  }
};

// The scales of two columns of each K-tile, kScaleThreads apart, K-tile by K-tile. Block numbers
// have 31 bits.
template <class Pair>
class ColumnScales {
 public:
  static constexpr int kColumns = kTileK / kScaleThreads;
  using Fetched = Pair[kColumns];

  // `expert` is the index in a stack of such weights.
  __device__ __forceinline__ ColumnScales(const WeightView &weight, int row, int column, int expert)
      : weight_(weight), left_(static_cast<int>(weight.cols) - column) {
    // Past the last row it is the last scale; the rows that it multiplies are not stored.
    const int second = row + 64 < weight.rows ? 64 : 0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int64_t in_stack = expert * weight.cols + int64_t{column + i * kScaleThreads};
      const int64_t first = in_stack * weight.rows + row;
      block_[i] = static_cast<int>(first >> weight.blocksize_log2);
      distance_[i] = static_cast<int>(first + second >> weight.blocksize_log2) - block_[i];
    }
  }

  // The scales of the first K-tile.
  template <class Scales>
  __device__ __forceinline__ void prefetch() const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (i * kScaleThreads < left_) Scales::prefetch(weight_, block_[i]);
  }

  // Fetches the scales of the next K-tile; past the last column nothing. The columns of a K-tile
  // are whole blocks, as rows are multiples of 64.
  __device__ __forceinline__ void fetch(Fetched &to) {
    const int step = static_cast<int>(weight_.rows * kTileK >> weight_.blocksize_log2);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (i * kScaleThreads < left_) to[i] = Pair::fetch(weight_, block_[i], distance_[i]);
      block_[i] += step;
    }
    left_ -= kTileK;
  }

 private:
  const WeightView &weight_;
  int left_;  // in columns
  int block_[kColumns];
  int distance_[kColumns];
};

template <class Scales, class Tile>
class TransposedScaleLoader {
 public:
  __device__ __forceinline__ TransposedScaleLoader(const typename Tile::Args &args,
                                                   SharedStorage<Tile> shared, int thread)
      : args_(args),
        weight_(args.matmul.weight),
        shared_(shared),
        thread_(thread),
        table_(shared.scale_code()),
        least_right_(TransposedScaleStage::least_right(args.decode.exact)) {}

  template <class Pair>
  __device__ __forceinline__ void load(const WorkTile &work, int expert) {
    using Columns = ColumnScales<Pair>;
    constexpr int kAhead = sizeof(Pair) > 8 ? 2 : 4;  // K-tiles between load and use
    Columns columns(weight_, work.n, work.k_tile * kTileK + thread_, expert);
    if (first_) {
      columns.template prefetch<Scales>();
      table_.prefetch(weight_, thread_);
      begin_loads<typename Tile::Kind>(args_);
      table_.load(weight_, thread_);
    }
    typename Columns::Fetched fetched[kAhead];
    int left = work.k_tile_end - work.k_tile;  // K-tiles left to fetch
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

  // Skips the K-tiles of an adapter, which have no scales.
  __device__ __forceinline__ void pass(int k_tiles) {
    for (; k_tiles > 0; --k_tiles) {
      mbarrier_wait_parity(shared_.barrier(kWeightEmpty, state_.stage), state_.phase ^ 1);
      commit();
    }
  }

 private:
  static_assert(Tile::kTileN == 128);

  __device__ __forceinline__ void commit() {
    mbarrier_arrive_warp(shared_.barrier(kWeightFull, state_.stage));
    if (first_) mbarrier_arrive_warp(shared_.first_scales());
    first_ = false;
    state_.advance();
  }

  // The scale is 0 past the last column, where dY is 0.
  template <class Pair, int Columns>
  __device__ __forceinline__ void store(int k_tile, const Pair (&fetched)[Columns]) {
    mbarrier_wait_parity(shared_.barrier(kWeightEmpty, state_.stage), state_.phase ^ 1);
    const TransposedScaleStage to{shared_.scales(state_.stage)};
    bool right = true;
#pragma unroll
    for (int i = 0; i < Columns; ++i) {
      const int column = thread_ + i * kScaleThreads;
      float2 scales{};
      if (int64_t{k_tile} * kTileK + column < weight_.cols) {
        scales = fetched[i].finish(table_);
        right &= TransposedScaleStage::is_right(scales, least_right_);
      }
      const float factor = args_.decode.scale_factor;
      to.store(column, {scales.x * factor, scales.y * factor});
      if constexpr (kHasFp16Scales<Tile>) to.store_fp16(column, scales);
    }
    if constexpr (kHasFp16Scales<Tile>) to.store_right(thread_ / 32, __all_sync(0xffffffff, right));
    commit();
  }

  const typename Tile::Args &args_;
  const WeightView &weight_;
  const SharedStorage<Tile> shared_;
  const int thread_;
  LateScaleTable<Scales> table_;
  const float least_right_;
  bool first_ = true;
  WeightPipelineState<Tile> state_;
};

template <class Scales, class Tile, class Scheduler>
__device__ __forceinline__ void load_transposed_scales(const typename Tile::Args &args,
                                                       SharedStorage<Tile> shared, int thread) {
  TransposedScaleLoader<Scales, Tile> loader(args, shared, thread);
  if (args.scale_vectors)
    for_each_work_tile<Scheduler>(args, [&](const Scheduler &scheduler) {
      const WorkTile work = scheduler.work_tile();
      loader.template load<PairedScales<Scales>>(work, scheduler.expert_along_k());
      loader.pass(lora_k_tiles<Tile>(args, work));
    });
  else
    for_each_work_tile<Scheduler>(args, [&](const Scheduler &scheduler) {
      const WorkTile work = scheduler.work_tile();
      loader.template load<SeparateScales<Scales>>(work, scheduler.expert_along_k());
      loader.pass(lora_k_tiles<Tile>(args, work));
    });
}

}  // namespace
}  // namespace nf4::cuda
