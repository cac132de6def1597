// The two producer warps that load the scales of a weight, finish them and store them by K-tiles.
#pragma once

#include <cstdint>

#include "cuda/matmul/scales.cuh"
#include "cuda/matmul/wgmma/scheduler.cuh"
#include "cuda/matmul/wgmma/shared.cuh"
#include "cuda/ptx/mbarrier.cuh"

namespace nf4::cuda {
namespace {

constexpr int kScaleThreads = 64;

// The scales of a work tile one by one, by 32-bit offsets from its first row. Past the last row or
// column they are those of the last, and count for nothing.
template <bool Nested>
class ScaleCursor {
 public:
  __device__ __forceinline__ ScaleCursor(const WeightView &weight, int first_row, int64_t row_end)
      : weight_(weight),
        first_row_(min(static_cast<int64_t>(first_row), row_end - 1)),
        row_end_(row_end) {
    const int64_t first = first_row_ * weight.cols;
    const int64_t block = first >> weight.blocksize_log2;
    absmax_ = static_cast<const uint8_t *>(weight.absmax) + block * (Nested ? 1 : 4);
    phase_ = static_cast<int>(first & ((int64_t{1} << weight.blocksize_log2) - 1));
    if constexpr (Nested) {
      nested_absmax_ = weight.nested_absmax + (block >> weight.nested_blocksize_log2);
      nested_phase_ = static_cast<int>(block & ((int64_t{1} << weight.nested_blocksize_log2) - 1));
    }
  }

  // Where a row of the tile begins.
  __device__ __forceinline__ int row_elements(int row) const {
    const int last = static_cast<int>(min(row_end_ - 1 - first_row_, int64_t{INT32_MAX}));
    return phase_ + min(row, last) * static_cast<int>(weight_.cols);
  }

  // Two steps of the row that begins there.
  __device__ __forceinline__ void fetch(int row_elements, int step,
                                        FetchedScale<Nested> (&to)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = min((step + i) * kStepK, static_cast<int>(weight_.cols) - kStepK);
      const int block = (row_elements + column) >> weight_.blocksize_log2;
      if constexpr (Nested)
        to[i] = {nested_absmax_[(nested_phase_ + block) >> weight_.nested_blocksize_log2],
                 absmax_[block]};
      else
        to[i] = {reinterpret_cast<const float *>(absmax_)[block], 0};
    }
  }

 private:
  const WeightView &weight_;
  const int64_t first_row_;
  const int64_t row_end_;
  const uint8_t *absmax_;
  const float *nested_absmax_;
  int phase_;
  int nested_phase_;
};

// A row's scales of kKTiles K-tiles in one load: where each step is a block, a row's blocks are a
// multiple of eight, and so is a nested block.
template <bool Nested>
struct ScaleVector;
template <>
struct ScaleVector<true> {
  static constexpr int kKTiles = 4;
  uint2 codes;
  float absmax;
  __device__ __forceinline__ void load(const WeightView &weight, int64_t block) {
    codes = *reinterpret_cast<const uint2 *>(static_cast<const uint8_t *>(weight.absmax) + block);
    absmax = weight.nested_absmax[block >> weight.nested_blocksize_log2];
  }
  // Of K-tile `k_tile` of the vector.
  __device__ __forceinline__ float2 scales(int k_tile, const float *scale_code,
                                           float offset) const {
    const uint32_t both = (k_tile < 2 ? codes.x : codes.y) >> k_tile % 2 * 16;
    return {nested_scale(scale_code[both & 255u], absmax, offset),
            nested_scale(scale_code[both >> 8 & 255u], absmax, offset)};
  }
};
template <>
struct ScaleVector<false> {
  static constexpr int kKTiles = 2;
  float4 values;
  __device__ __forceinline__ void load(const WeightView &weight, int64_t block) {
    values = *reinterpret_cast<const float4 *>(static_cast<const float *>(weight.absmax) + block);
  }
  __device__ __forceinline__ float2 scales(int k_tile, const float *, float) const {
    return k_tile == 0 ? float2{values.x, values.y} : float2{values.z, values.w};
  }
};

// kScaleThreads threads, numbered by `thread`.
template <bool Nested, class Tile>
class ScaleLoader {
 public:
  __device__ __forceinline__ ScaleLoader(const WgmmaArgs &args, SharedStorage<Tile> shared,
                                         int thread)
      : weight_(args.matmul.weight), shared_(shared), thread_(thread), offset_(0) {
    if constexpr (Nested) {
      offset_ = *weight_.nested_offset;
#pragma unroll
      for (int i = 0; i < kScaleCodeSize / kScaleThreads; ++i)
        scale_code_[i] = weight_.nested_code[i * kScaleThreads + thread];
    }
  }

  // By vectors, which are loaded as soon as there is room for them.
  __device__ __forceinline__ void load_vectors(const WorkTile &work, int64_t n_end) {
    constexpr int kKTiles = ScaleVector<Nested>::kKTiles;
    ScaleVector<Nested> vectors[kRows];
    load_vector(work, n_end, work.k_tile / kKTiles, vectors);
    store_scale_code();
    for (int k_tile = work.k_tile; k_tile < work.k_tile_end; ++k_tile) {
      float2 *const to = acquire();
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        to[thread_ + i * kScaleThreads] =
            vectors[i].scales(k_tile % kKTiles, shared_.scale_code(), offset_);
      if ((k_tile + 1) % kKTiles == 0 && k_tile + 1 < work.k_tile_end)
        load_vector(work, n_end, (k_tile + 1) / kKTiles, vectors);
      commit();
    }
  }

  // Each scale by itself, a K-tile ahead.
  __device__ __forceinline__ void load_each(const WorkTile &work, int64_t n_end) {
    const ScaleCursor<Nested> cursor(weight_, work.n, n_end);
    FetchedScale<Nested> fetched[kRows][2];
    int elements[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      elements[i] = cursor.row_elements(thread_ + i * kScaleThreads);
      cursor.fetch(elements[i], work.k_tile * 2, fetched[i]);
    }
    store_scale_code();
    for (int k_tile = work.k_tile; k_tile < work.k_tile_end; ++k_tile) {
      float2 *const to = acquire();
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float first = finish_scale(fetched[i][0], shared_.scale_code(), offset_);
        const float second = finish_scale(fetched[i][1], shared_.scale_code(), offset_);
        // 0 past the last step, where another row's might make an infinity.
        const bool exists = (k_tile * 2 + 1) * kStepK < weight_.cols;
        to[thread_ + i * kScaleThreads] = {first, exists ? second : 0.0f};
        cursor.fetch(elements[i], min(k_tile + 1, work.k_tile_end - 1) * 2, fetched[i]);
      }
      commit();
    }
  }

 private:
  static constexpr int kRows = Tile::kTileN / kScaleThreads;  // of a thread

  // Before the first scale is finished, while the first loads are on their way.
  __device__ __forceinline__ void store_scale_code() {
    if constexpr (Nested) {
      if (has_scale_code_) return;
#pragma unroll
      for (int i = 0; i < kScaleCodeSize / kScaleThreads; ++i)
        shared_.scale_code()[i * kScaleThreads + thread_] = scale_code_[i];
      named_barrier_sync(2, kScaleThreads);
      has_scale_code_ = true;
    }
  }

  __device__ __forceinline__ void load_vector(const WorkTile &work, int64_t n_end, int index,
                                              ScaleVector<Nested> (&to)[kRows]) const {
    const int64_t row_blocks = weight_.cols / kStepK;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = min(int64_t{work.n} + thread_ + i * kScaleThreads, n_end - 1);
      to[i].load(weight_, row * row_blocks + index * 2 * ScaleVector<Nested>::kKTiles);
    }
  }

  __device__ __forceinline__ float2 *acquire() const {
    mbarrier_wait_parity(shared_.barrier(kWeightEmpty, state_.stage), state_.phase ^ 1);
    return shared_.scales(state_.stage);
  }
  __device__ __forceinline__ void commit() {
    mbarrier_arrive_warp(shared_.barrier(kWeightFull, state_.stage));
    if (first_) mbarrier_arrive_warp(shared_.first_scales());
    first_ = false;
    state_.advance();
  }

  const WeightView &weight_;
  const SharedStorage<Tile> shared_;
  const int thread_;
  float offset_;
  float scale_code_[kScaleCodeSize / kScaleThreads];
  bool has_scale_code_ = false;
  bool first_ = true;
  WeightPipelineState<Tile> state_;
};

template <bool Nested, class Tile, class Scheduler>
__device__ __forceinline__ void load_scales(const WgmmaArgs &args, SharedStorage<Tile> shared,
                                            int thread) {
  ScaleLoader<Nested, Tile> loader(args, shared, thread);
  if (args.scale_vectors)
    for_each_work_tile<Scheduler>(args, [&](const Scheduler &scheduler) {
      const WorkTile work = scheduler.work_tile();
      loader.load_vectors(work, scheduler.n_end(work));
    });
  else
    for_each_work_tile<Scheduler>(args, [&](const Scheduler &scheduler) {
      const WorkTile work = scheduler.work_tile();
      loader.load_each(work, scheduler.n_end(work));
    });
}

}  // namespace
}  // namespace nf4::cuda
