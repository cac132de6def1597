// The warps of a wide kernel that bring x, the weight's bytes and its scales.
#pragma once

#include <cstdint>

#include "cuda/matmul/scales.cuh"
#include "cuda/matmul/wide_walk.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/tma.cuh"

namespace nf4::cuda {
namespace {

constexpr int kScaleThreads = 64;

// One thread. Loads are answered in turn, and those of the scales are small: what is not of the
// first slab is asked for when the first scales are there.
template <class Tile>
__device__ __forceinline__ void feed_x(const WideArgs &wide, WideShared<Tile> shared) {
  constexpr int kBox = WideLayout<Tile>::kXBox;
  XTurn<Tile> turn;
  int asked = 0;
  each_place<Tile>(wide, [&](const WidePlace &place) {
    for (int step = place.first_slab * 2; step < place.end_slab * 2; ++step) {
      if (asked++ == 2) mbarrier_wait_parity(shared.first_scales(), 0);
      uint64_t *const full = shared.barrier(kXFull, turn.slot);
      mbarrier_wait_parity(shared.barrier(kXEmpty, turn.slot), turn.parity ^ 1);
      mbarrier_arrive_expect_tx(full, WideLayout<Tile>::kXBytes);
      for (int row = 0; row < Tile::kColumns; row += kBox)
        tma_load_2d(shared.x(turn.slot) + row * kStepColumns * 2, &wide.x, step * kStepColumns * 2,
                    place.of_x + row, full);
      turn.advance();
    }
  });
}

// One thread, in the same order.
template <class Tile>
__device__ __forceinline__ void feed_slabs(const WideArgs &wide, WideShared<Tile> shared) {
  SlabTurn<Tile> turn;
  int asked = 0;
  each_place<Tile>(wide, [&](const WidePlace &place) {
    for (int slab = place.first_slab; slab < place.end_slab; ++slab) {
      if (asked++ == 1) mbarrier_wait_parity(shared.first_scales(), 0);
      uint64_t *const full = shared.barrier(kSlabFull, turn.slot);
      mbarrier_wait_parity(shared.barrier(kSlabEmpty, turn.slot), turn.parity ^ 1);
      mbarrier_arrive_expect_tx(full, WideLayout<Tile>::kSlabBytes);
      tma_load_2d(shared.slab(turn.slot), &wide.packed, slab * (kSlabColumns / 2), place.row, full);
      turn.advance();
    }
  });
}

// Asks L2 for the first slabs, which may be done while the predecessor still writes. More than
// this would delay the first small loads.
template <class Tile>
__device__ __forceinline__ void prefetch_slabs(const WideArgs &wide) {
  constexpr int kSlabs = (32 << 10) / WideLayout<Tile>::kSlabBytes;
  const WideWalk<Tile> walk(wide);
  if (!walk.more()) return;
  const WidePlace place = walk.place();
  const int end = min(place.first_slab + kSlabs, place.end_slab);
  for (int slab = place.first_slab; slab < end; ++slab)
    tma_prefetch_2d(&wide.packed, slab * (kSlabColumns / 2), place.row);
}

// The scales of a group of slabs of a row. Offsets from the tile's first row have 32 bits. What
// is out of the matrix has the scale of its last row or step, and counts for nothing.
template <bool Nested>
class ScaleSource {
 public:
  __device__ __forceinline__ ScaleSource(const MatmulArgs &args, int row)
      : args_(args), row_(min(static_cast<int64_t>(row), args.rows - 1)) {
    const int64_t first = row_ * args.cols;
    const int64_t block = first >> args.blocksize_log2;
    absmax_ = static_cast<const uint8_t *>(args.absmax) + block * (Nested ? 1 : 4);
    phase_ = static_cast<int>(first & ((int64_t{1} << args.blocksize_log2) - 1));
    if constexpr (Nested) {
      nested_absmax_ = args.nested_absmax + (block >> args.nested_blocksize_log2);
      nested_phase_ = static_cast<int>(block & ((int64_t{1} << args.nested_blocksize_log2) - 1));
    }
  }

  __device__ __forceinline__ int row_elements(int row) const {
    const int last = static_cast<int>(min(args_.rows - 1 - row_, int64_t{INT32_MAX}));
    return phase_ + min(row, last) * static_cast<int>(args_.cols);
  }

  // Steps of one row at a time.
  __device__ __forceinline__ void fetch(int row_elements, int step,
                                        FetchedScale<Nested> (&to)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column =
          min((step + i) * kStepColumns, static_cast<int>(args_.cols) - kStepColumns);
      const int block = (row_elements + column) >> args_.blocksize_log2;
      if constexpr (Nested)
        to[i] = {nested_absmax_[(nested_phase_ + block) >> args_.nested_blocksize_log2],
                 absmax_[block]};
      else
        to[i] = {reinterpret_cast<const float *>(absmax_)[block], 0};
    }
  }

 private:
  const MatmulArgs &args_;
  const int64_t row_;
  const uint8_t *absmax_;
  const float *nested_absmax_;
  int phase_;
  int nested_phase_;
};

// Scales of a row's slabs as they lie in memory, loaded kSlabs at once: where each step is a
// block, a row's blocks are a multiple of eight, and so is a nested block.
template <bool Nested>
struct ScaleGroup;
template <>
struct ScaleGroup<true> {
  static constexpr int kSlabs = 4;
  uint2 q;
  float nested;
  __device__ __forceinline__ void load(const MatmulArgs &args, int64_t block) {
    q = *reinterpret_cast<const uint2 *>(static_cast<const uint8_t *>(args.absmax) + block);
    nested = args.nested_absmax[block >> args.nested_blocksize_log2];
  }
  // Of slab `slab` of the group.
  __device__ __forceinline__ float2 scales(int slab, const float *code, float offset) const {
    const uint32_t both = (slab < 2 ? q.x : q.y) >> slab % 2 * 16;
    return {nested_scale(code[both & 255u], nested, offset),
            nested_scale(code[both >> 8 & 255u], nested, offset)};
  }
};
template <>
struct ScaleGroup<false> {
  static constexpr int kSlabs = 2;
  float4 values;
  __device__ __forceinline__ void load(const MatmulArgs &args, int64_t block) {
    values = *reinterpret_cast<const float4 *>(static_cast<const float *>(args.absmax) + block);
  }
  __device__ __forceinline__ float2 scales(int slab, const float *, float) const {
    return slab == 0 ? float2{values.x, values.y} : float2{values.z, values.w};
  }
};

// kScaleThreads threads, numbered by `thread`.
template <bool Nested, class Tile>
class ScaleFeed {
 public:
  __device__ __forceinline__ ScaleFeed(const WideArgs &wide, WideShared<Tile> shared, int thread)
      : wide_(wide), shared_(shared), thread_(thread), offset_(0) {
    if constexpr (Nested) {
      offset_ = *wide.matmul.nested_offset;
#pragma unroll
      for (int i = 0; i < kScaleCodeSize / kScaleThreads; ++i)
        code_[i] = wide.matmul.nested_code[i * kScaleThreads + thread];
    }
  }

  // Scales in groups, which are loaded as soon as there is room for them.
  __device__ __forceinline__ void feed_groups(const WidePlace &place) {
    constexpr int kSlabs = ScaleGroup<Nested>::kSlabs;
    ScaleGroup<Nested> group[kRows];
    load_group(place, place.first_slab / kSlabs, group);
    share_code();
    for (int slab = place.first_slab; slab < place.end_slab; ++slab) {
      float2 *const to = start_slab();
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        to[thread_ + i * kScaleThreads] = group[i].scales(slab % kSlabs, shared_.code(), offset_);
      if ((slab + 1) % kSlabs == 0 && slab + 1 < place.end_slab)
        load_group(place, (slab + 1) / kSlabs, group);
      end_slab();
    }
  }

  // Each scale by itself, a slab ahead.
  __device__ __forceinline__ void feed_steps(const WidePlace &place) {
    const ScaleSource<Nested> source(wide_.matmul, place.row);
    FetchedScale<Nested> fetched[kRows][2];
    int elements[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      elements[i] = source.row_elements(thread_ + i * kScaleThreads);
      source.fetch(elements[i], place.first_slab * 2, fetched[i]);
    }
    share_code();
    for (int slab = place.first_slab; slab < place.end_slab; ++slab) {
      float2 *const to = start_slab();
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float first = finish_scale(fetched[i][0], shared_.code(), offset_);
        const float second = finish_scale(fetched[i][1], shared_.code(), offset_);
        // Of a step that there is not, where another row's might make an infinity.
        const bool there = (slab * 2 + 1) * kStepColumns < wide_.matmul.cols;
        to[thread_ + i * kScaleThreads] = {first, there ? second : 0.0f};
        source.fetch(elements[i], min(slab + 1, place.end_slab - 1) * 2, fetched[i]);
      }
      end_slab();
    }
  }

 private:
  static constexpr int kRows = Tile::kRows / kScaleThreads;

  // Before the first scale is made, while the first loads are on their way.
  __device__ __forceinline__ void share_code() {
    if constexpr (Nested) {
      if (have_code_) return;
#pragma unroll
      for (int i = 0; i < kScaleCodeSize / kScaleThreads; ++i)
        shared_.code()[i * kScaleThreads + thread_] = code_[i];
      named_barrier_sync(2, kScaleThreads);
      have_code_ = true;
    }
  }

  __device__ __forceinline__ void load_group(const WidePlace &place, int group,
                                             ScaleGroup<Nested> (&to)[kRows]) const {
    const int64_t row_blocks = wide_.matmul.cols / kStepColumns;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row =
          min(int64_t{place.row} + thread_ + i * kScaleThreads, wide_.matmul.rows - 1);
      to[i].load(wide_.matmul, row * row_blocks + group * 2 * ScaleGroup<Nested>::kSlabs);
    }
  }

  __device__ __forceinline__ float2 *start_slab() const {
    mbarrier_wait_parity(shared_.barrier(kSlabEmpty, turn_.slot), turn_.parity ^ 1);
    return shared_.scales(turn_.slot);
  }
  __device__ __forceinline__ void end_slab() {
    mbarrier_arrive_warp(shared_.barrier(kSlabFull, turn_.slot));
    if (first_) mbarrier_arrive_warp(shared_.first_scales());
    first_ = false;
    turn_.advance();
  }

  const WideArgs &wide_;
  const WideShared<Tile> shared_;
  const int thread_;
  float offset_;
  float code_[kScaleCodeSize / kScaleThreads];
  bool have_code_ = false;
  bool first_ = true;
  SlabTurn<Tile> turn_;
};

template <bool Nested, class Tile>
__device__ __forceinline__ void feed_scales(const WideArgs &wide, WideShared<Tile> shared,
                                            int thread) {
  ScaleFeed<Nested, Tile> feed(wide, shared, thread);
  if (wide.scale_groups)
    each_place<Tile>(wide, [&](const WidePlace &place) { feed.feed_groups(place); });
  else
    each_place<Tile>(wide, [&](const WidePlace &place) { feed.feed_steps(place); });
}

// The producer warpgroup, by warp.
template <class Tile>
__device__ __forceinline__ void feed(const WideArgs &wide, WideShared<Tile> shared) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  if (warp == 0 && lane == 0) prefetch_tensor_map(&wide.x);
  if (warp == 1 && lane == 0) prefetch_slabs<Tile>(wide);
  pdl_wait<Sm90>();
  pdl_launch_dependents<Sm90>();
  if (warp == 0 && lane == 0) feed_x(wide, shared);
  if (warp == 1 && lane == 0) feed_slabs(wide, shared);
  if (warp < 2) return;
  const int thread = static_cast<int>(threadIdx.x) - 64;
  if (wide.matmul.nested_absmax != nullptr)
    feed_scales<true>(wide, shared, thread);
  else
    feed_scales<false>(wide, shared, thread);
}

}  // namespace
}  // namespace nf4::cuda
