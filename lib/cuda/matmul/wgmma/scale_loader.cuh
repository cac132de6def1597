// The two producer warps that load the scales of a weight with a codebook, finish them and store
// them by K-tiles.
#pragma once

#include <cstdint>

#include "cuda/matmul/wgmma/scheduler.cuh"
#include "cuda/matmul/wgmma/shared.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/weight/scales.cuh"

namespace nf4::cuda {
namespace {

// Like ScaleTable, but in registers until store(), which waits for the loads. That is before the
// first scale is finished, while the scale's own loads are in flight.
template <class Scales>
class LateScaleTable {
 public:
  __device__ __forceinline__ explicit LateScaleTable(float *entries)
      : entries_(entries), offset_(0) {}

  // Prefetches into L2, which is allowed while the predecessor still writes.
  static __device__ __forceinline__ void prefetch(const WeightView &weight, int thread) {
    constexpr int kOfSector = 8;
    if constexpr (Scales::kTableSize > 0) {
      if (thread == kScaleThreads - 1) prefetch_l2_sector(weight.nested_offset);
      if (thread < Scales::kTableSize / kOfSector)
        prefetch_l2_sector(weight.nested_code + thread * kOfSector);
    }
  }

  __device__ __forceinline__ void load(const WeightView &weight, int thread) {
    if constexpr (Scales::kTableSize > 0) {
      offset_ = *weight.nested_offset;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i)
        registers_[i] = weight.nested_code[i * kScaleThreads + thread];
    }
  }

  __device__ __forceinline__ void store(int thread) {
    if constexpr (Scales::kTableSize > 0) {
      if (stored_) return;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) entries_[i * kScaleThreads + thread] = registers_[i];
      named_barrier_sync(2, kScaleThreads);
      stored_ = true;
    }
  }

  __device__ __forceinline__ float operator[](uint32_t code) const { return entries_[code]; }
  __device__ __forceinline__ float offset() const { return offset_; }

 private:
  static constexpr int kPerThread = Scales::kTableSize / kScaleThreads;

  float *const entries_;
  float offset_;
  float registers_[kPerThread > 0 ? kPerThread : 1];
  bool stored_ = false;
};

// Reads the scales of a work tile one by one, by 32-bit offsets from its first row. Past the last
// row or column it reads those of the last one, which have no effect.
template <class Scales>
class TileScales {
 public:
  __device__ __forceinline__ TileScales(const WeightView &weight, int first_row, int64_t n_end)
      : weight_(weight),
        first_row_(min(static_cast<int64_t>(first_row), n_end - 1)),
        n_end_(n_end),
        cursor_(weight, first_row_ * weight.cols >> weight.blocksize_log2),
        phase_(static_cast<int>(first_row_ * weight.cols &
                                ((int64_t{1} << weight.blocksize_log2) - 1))) {}

  // The element at which a row of the tile begins.
  __device__ __forceinline__ int row_elements(int row) const {
    const int last = static_cast<int>(min(n_end_ - 1 - first_row_, int64_t{INT32_MAX}));
    return phase_ + min(row, last) * static_cast<int>(weight_.cols);
  }

  // Fetches the scales of two steps of the row that begins there.
  __device__ __forceinline__ void fetch(int row_elements, int step,
                                        typename Scales::Fetched (&to)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = min((step + i) * kStepK, static_cast<int>(weight_.cols) - kStepK);
      to[i] = cursor_.template fetch<LoadGlobal>(weight_,
                                                 (row_elements + column) >> weight_.blocksize_log2);
    }
  }

 private:
  const WeightView &weight_;
  const int64_t first_row_;
  const int64_t n_end_;
  const typename Scales::Cursor cursor_;
  const int phase_;  // phase of the first row in its block
};

// kScaleThreads threads, numbered by `thread`.
template <class Scales, class Tile>
class ScaleLoader {
 public:
  __device__ __forceinline__ ScaleLoader(const typename Tile::Args &args,
                                         SharedStorage<Tile> shared, int thread)
      : args_(args),
        weight_(args.matmul.weight),
        shared_(shared),
        thread_(thread),
        table_(shared.scale_code()) {}

  // Loads vectors, each as soon as there is room for it. Each step must be a block, and vectors
  // must be aligned.
  __device__ __forceinline__ void load_vectors(const WorkTile &work, int64_t n_end) {
    Vector vectors[kRows];
    if (first_) {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        Scales::prefetch(weight_, vector_block(work, n_end, work.k_tile / kVectorKTiles, i));
      begin();
    }
    fetch_vectors(work, n_end, work.k_tile / kVectorKTiles, vectors);
    table_.store(thread_);
    for (int k_tile = work.k_tile; k_tile < work.k_tile_end; ++k_tile) {
      float2 *const to = acquire();
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        to[thread_ + i * kScaleThreads] =
            decoded(vectors[i].finish(k_tile % kVectorKTiles, table_));
      if ((k_tile + 1) % kVectorKTiles == 0 && k_tile + 1 < work.k_tile_end)
        fetch_vectors(work, n_end, (k_tile + 1) / kVectorKTiles, vectors);
      commit();
    }
  }

  // Loads each scale by itself, a K-tile ahead.
  __device__ __forceinline__ void load_each(const WorkTile &work, int64_t n_end) {
    if (first_) begin();
    const TileScales<Scales> scales(weight_, work.n, n_end);
    typename Scales::Fetched fetched[kRows][2];
    int elements[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      elements[i] = scales.row_elements(thread_ + i * kScaleThreads);
      scales.fetch(elements[i], work.k_tile * 2, fetched[i]);
    }
    table_.store(thread_);
    for (int k_tile = work.k_tile; k_tile < work.k_tile_end; ++k_tile) {
      float2 *const to = acquire();
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float first = Scales::finish(fetched[i][0], table_);
        const float second = Scales::finish(fetched[i][1], table_);
        // The scale is 0 past the last step, where another row's scale might give an infinity.
        const bool exists = (k_tile * 2 + 1) * kStepK < weight_.cols;
        to[thread_ + i * kScaleThreads] = decoded({first, exists ? second : 0.0f});
        scales.fetch(elements[i], min(k_tile + 1, work.k_tile_end - 1) * 2, fetched[i]);
      }
      commit();
    }
  }

  // Skips the K-tiles of an adapter, which have no scales.
  __device__ __forceinline__ void pass(int k_tiles) {
    for (; k_tiles > 0; --k_tiles) {
      acquire();
      commit();
    }
  }

 private:
  using Vector = typename Scales::Vector;
  static constexpr int kVectorKTiles = Vector::kBlocks / 2;
  static constexpr int kRows = Tile::kTileN / kScaleThreads;  // per thread

  // Called once, before the first load.
  __device__ __forceinline__ void begin() {
    table_.prefetch(weight_, thread_);
    begin_loads<typename Tile::Kind>(args_);
    table_.load(weight_, thread_);
  }

  // The first block of the index-th vector of this thread's i-th row.
  __device__ __forceinline__ int64_t vector_block(const WorkTile &work, int64_t n_end, int index,
                                                  int i) const {
    const int64_t row = min(int64_t{work.n} + thread_ + i * kScaleThreads, n_end - 1);
    return row * (weight_.cols / kStepK) + index * Vector::kBlocks;
  }
  __device__ __forceinline__ void fetch_vectors(const WorkTile &work, int64_t n_end, int index,
                                                Vector (&to)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      to[i] = Vector::template fetch<LoadGlobal>(weight_, vector_block(work, n_end, index, i));
  }

  // Returns the scales in the form that decoding needs.
  __device__ __forceinline__ float2 decoded(float2 scales) const {
    const float factor = args_.decode.scale_factor;
    return {scales.x * factor, scales.y * factor};
  }

  __device__ __forceinline__ float2 *acquire() const {
    mbarrier_wait_parity(shared_.barrier(kWeightEmpty, state_.stage), state_.phase ^ 1);
    return reinterpret_cast<float2 *>(shared_.scales(state_.stage));
  }
  __device__ __forceinline__ void commit() {
    mbarrier_arrive_warp(shared_.barrier(kWeightFull, state_.stage));
    if (first_) mbarrier_arrive_warp(shared_.first_scales());
    first_ = false;
    state_.advance();
  }

  const typename Tile::Args &args_;
  const WeightView &weight_;
  const SharedStorage<Tile> shared_;
  const int thread_;
  LateScaleTable<Scales> table_;
  bool first_ = true;
  WeightPipelineState<Tile> state_;
};

template <class Scales, class Tile, class Scheduler>
__device__ __forceinline__ void load_scales(const typename Tile::Args &args,
                                            SharedStorage<Tile> shared, int thread) {
  ScaleLoader<Scales, Tile> loader(args, shared, thread);
  if (args.scale_vectors)
    for_each_work_tile<Scheduler>(args, [&](const Scheduler &scheduler) {
      const WorkTile work = scheduler.work_tile();
      loader.load_vectors(work, scheduler.n_end(work));
      loader.pass(lora_k_tiles<Tile>(args, work));
    });
  else
    for_each_work_tile<Scheduler>(args, [&](const Scheduler &scheduler) {
      const WorkTile work = scheduler.work_tile();
      loader.load_each(work, scheduler.n_end(work));
      loader.pass(lora_k_tiles<Tile>(args, work));
    });
}

}  // namespace
}  // namespace nf4::cuda
