// The warps of a wide kernel that bring x, the weight's bytes and its scales.
#pragma once

#include <cstdint>

#include "cuda/cluster.cuh"
#include "cuda/matmul/scales.cuh"
#include "cuda/matmul/wide_walk.cuh"
#include "cuda/matmul/wide_weights.cuh"

namespace nf4::cuda {
namespace {

constexpr int kScaleThreads = 64;

// One thread. In a pair each block asks for half of the rows, for both.
template <class Tile>
__device__ __forceinline__ void feed_x(const WideArgs &wide, WideShared<Tile> shared) {
  constexpr int kHalf = Tile::kColumns / 2;
  const int rank = wide.pair > 1 ? static_cast<int>(cluster_rank()) : 0;
  XTurn<Tile> turn;
  each_tile<Tile>(wide, [&](const WidePlace &place) {
    for (int step = place.first_slab * 2; step < place.end_slab * 2; ++step) {
      uint64_t *const full = shared.barrier(kXFull, turn.slot);
      wait_for_phase(shared.barrier(kXEmpty, turn.slot), turn.parity ^ 1);
      expect_bytes(full, WideLayout<Tile>::kXBytes);
      uint8_t *const to = shared.x(turn.slot);
      const int column = step * kStepColumns * 2;
      if (wide.pair > 1)
        copy_box_to_cluster(to + rank * kHalf * 128, &wide.x, column, place.of_x + rank * kHalf,
                            full, 3);
      else
        copy_box(to, &wide.x, column, place.of_x, full);
      turn.advance();
    }
  });
}

// One thread.
template <class Tile>
__device__ __forceinline__ void feed_slabs(const WideArgs &wide, WideShared<Tile> shared) {
  SlabTurn<Tile> turn;
  each_tile<Tile>(wide, [&](const WidePlace &place) {
    for (int slab = place.first_slab; slab < place.end_slab; ++slab) {
      uint64_t *const full = shared.barrier(kSlabFull, turn.slot);
      wait_for_phase(shared.barrier(kSlabEmpty, turn.slot), turn.parity ^ 1);
      expect_bytes(full, WideLayout<Tile>::kSlabBytes);
      copy_box(shared.slab(turn.slot), &wide.packed, slab * (kSlabColumns / 2), place.row, full);
      turn.advance();
    }
  });
}

// Asks L2 for the first slabs, which may be done while the predecessor still writes.
template <class Tile>
__device__ __forceinline__ void prefetch_slabs(const WideArgs &wide) {
  bool first = true;
  each_tile<Tile>(wide, [&](const WidePlace &place) {
    const int end = min(place.first_slab + WideLayout<Tile>::kSlabSlots, place.end_slab);
    for (int slab = place.first_slab; first && slab < end; ++slab)
      prefetch_box(&wide.packed, slab * (kSlabColumns / 2), place.row);
    first = false;
  });
}

// A thread's rows of a tile's scales: loaded a slab ahead. Offsets from the tile's first row
// have 32 bits. What is out of the matrix has the scale of its last row or step, and counts
// for nothing.
template <bool Nested, class Tile>
class ScaleRows {
 public:
  static constexpr int kCount = Tile::kRows / kScaleThreads;

  __device__ __forceinline__ void start(const MatmulArgs &args, int row) {
    const int64_t first_row = min(static_cast<int64_t>(row), args.rows - 1);
    const int64_t first = first_row * args.cols;
    const int64_t block = first >> args.blocksize_log2;
    absmax_ = static_cast<const uint8_t *>(args.absmax) + block * (Nested ? 1 : 4);
    phase_ = static_cast<int>(first & ((int64_t{1} << args.blocksize_log2) - 1));
    last_row_ = static_cast<int>(min(args.rows - 1 - first_row, int64_t{Tile::kRows - 1}));
    if constexpr (Nested) {
      nested_absmax_ = args.nested_absmax + (block >> args.nested_blocksize_log2);
      nested_phase_ = static_cast<int>(block & ((int64_t{1} << args.nested_blocksize_log2) - 1));
    }
  }

  __device__ __forceinline__ void fetch(const MatmulArgs &args, int slab, int thread) {
    const int cols = static_cast<int>(args.cols);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = phase_ + min(thread + i * kScaleThreads, last_row_) * cols;
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const int column = min(slab * kSlabColumns + step * kStepColumns, cols - kStepColumns);
        fetched_[i][step] = fetch_block(args, (row + column) >> args.blocksize_log2);
      }
    }
  }

  template <class T>
  __device__ __forceinline__ void store(uint2 *scales, int thread, const float *code, float offset,
                                        float factor) const {
    using Weights = WideWeights<T>;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      scales[thread + i * kScaleThreads] = {
          Weights::shared_scale(finish_scale(fetched_[i][0], code, offset), factor),
          Weights::shared_scale(finish_scale(fetched_[i][1], code, offset), factor)};
  }

 private:
  __device__ __forceinline__ FetchedScale<Nested> fetch_block(const MatmulArgs &args,
                                                              int block) const {
    if constexpr (Nested)
      return {__ldg(nested_absmax_ + ((nested_phase_ + block) >> args.nested_blocksize_log2)),
              __ldg(absmax_ + block)};
    else
      return {__ldg(reinterpret_cast<const float *>(absmax_) + block), 0};
  }

  const uint8_t *absmax_;
  const float *nested_absmax_;
  int phase_;
  int nested_phase_;
  int last_row_;
  FetchedScale<Nested> fetched_[kCount][2];
};

// kScaleThreads threads, numbered by `thread`.
template <class T, bool Nested, class Tile>
__device__ __forceinline__ void feed_scales(const WideArgs &wide, WideShared<Tile> shared,
                                            int thread) {
  const MatmulArgs &args = wide.matmul;
  float *const code = shared.code();
  float offset = 0;
  if constexpr (Nested) {
    for (int i = thread; i < kScaleCodeSize; i += kScaleThreads)
      code[i] = __ldg(args.nested_code + i);
    offset = __ldg(args.nested_offset);
    synchronize_threads(2, kScaleThreads);
  }
  const float factor = table_factor<T>(args);
  SlabTurn<Tile> turn;
  each_tile<Tile>(wide, [&](const WidePlace &place) {
    ScaleRows<Nested, Tile> rows;
    rows.start(args, place.row);
    rows.fetch(args, place.first_slab, thread);
    for (int slab = place.first_slab; slab < place.end_slab; ++slab) {
      wait_for_phase(shared.barrier(kSlabEmpty, turn.slot), turn.parity ^ 1);
      rows.template store<T>(shared.scales(turn.slot), thread, code, offset, factor);
      __syncwarp();
      if (thread % 32 == 0) arrive(shared.barrier(kSlabFull, turn.slot));
      turn.advance();
      rows.fetch(args, min(slab + 1, place.end_slab - 1), thread);
    }
  });
}

// The producer warpgroup, by warp.
template <class T, class Tile>
__device__ __forceinline__ void feed(const WideArgs &wide, WideShared<Tile> shared) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  if (warp == 0 && lane == 0) feed_x(wide, shared);
  if (warp == 1 && lane == 0) feed_slabs(wide, shared);
  if (warp < 2) return;
  const int thread = static_cast<int>(threadIdx.x) - 64;
  if (wide.matmul.nested_absmax != nullptr)
    feed_scales<T, true>(wide, shared, thread);
  else
    feed_scales<T, false>(wide, shared, thread);
}

}  // namespace
}  // namespace nf4::cuda
