// The two producer warps that load the scales and zeros of integer weights and store what decoding
// makes of them, by K-tiles.
#pragma once

#include <cstdint>

#include "core/int4.hpp"
#include "cuda/element.cuh"
#include "cuda/matmul/wgmma/scheduler.cuh"
#include "cuda/matmul/wgmma/shared.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/weight/int4_decode.cuh"

namespace nf4::cuda {
namespace {

// T: of x. Each of kScaleThreads threads, numbered by `thread`, has neighbouring rows, whose zeros
// are in one word and whose scales, where they lie by groups, in one vector.
template <class T, class Tile>
class Int4ScaleLoader {
 public:
  static constexpr int kRows = Tile::kTileN / kScaleThreads;  // of a thread

  __device__ __forceinline__ Int4ScaleLoader(const typename Tile::Args &args,
                                             SharedStorage<Tile> shared, int thread)
      : args_(args), shared_(shared), thread_(thread) {}

  // Loads are kAhead K-tiles ahead of stores, and find in L2 what was prefetched.
  __device__ __forceinline__ void load(const WorkTile &work, int64_t n_end) {
    first_row_ = min(int64_t{work.n} + thread_ * kRows, n_end - (kVectors ? kRows : 1));
    last_row_ = n_end - 1;
    Fetched fetched[kAhead][2];
    for (int k_tile = work.k_tile; k_tile < min(work.k_tile + kPrefetch, work.k_tile_end); ++k_tile)
      prefetch(k_tile);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fetch(work.k_tile + i, fetched[i]);
    for (int k_tile = work.k_tile; k_tile < work.k_tile_end; k_tile += kAhead)
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (k_tile + i >= work.k_tile_end) break;
        if (k_tile + i + kPrefetch < work.k_tile_end) prefetch(k_tile + i + kPrefetch);
        store(k_tile + i, fetched[i]);
        fetch(k_tile + i + kAhead, fetched[i]);
      }
  }

 private:
  static constexpr int kAhead = 2;
  static constexpr int kPrefetch = 8;  // K-tiles
  static constexpr bool kVectors = Tile::Layout::kLayout != NF4_INT4_COMPRESSED_TENSORS;

  // Of a step. Nothing waits for it before finish().
  struct Fetched {
    uint32_t zeros;
    uint32_t scales[kVectors ? kRows / 2 : kRows];

    __device__ __forceinline__ uint16_t scale(int i) const {
      return static_cast<uint16_t>(kVectors ? scales[i / 2] >> i % 2 * 16 : scales[i]);
    }
  };

  // Past the last step it is that one.
  __device__ __forceinline__ int64_t group(int step) const {
    const auto steps = static_cast<int>(args_.matmul.weight.cols / kStepK);
    return min(step, steps - 1) / args_.decode.group_steps;
  }

  // Of a K-tile, the second only where it is of another group.
  __device__ __forceinline__ void fetch(int k_tile, Fetched (&to)[2]) const {
    const int64_t first = group(k_tile * 2), second = group(k_tile * 2 + 1);
    fetch_group(first, to[0]);
    if (second != first) fetch_group(second, to[1]);
  }
  // Scales that lie by groups: those of a row share sectors with its next groups'.
  __device__ __forceinline__ void prefetch(int k_tile) const {
    if constexpr (kVectors) {
      const Int4View &weight = args_.matmul.weight;
      const int64_t g = group(k_tile * 2);
      prefetch_l2(weight.scales +
                  int4_scale(Tile::Layout::kLayout, weight.rows, weight.groups, first_row_, g));
      if (weight.zeros != nullptr)
        prefetch_l2(
            weight.zeros +
            int4_zero(Tile::Layout::kLayout, weight.rows, weight.groups, first_row_, g).word);
    }
  }
  __device__ __forceinline__ void fetch_group(int64_t group, Fetched &to) const {
    const Int4View &weight = args_.matmul.weight;
    constexpr nf4_int4_layout kLayout = Tile::Layout::kLayout;
    if (weight.zeros != nullptr)
      to.zeros =
          weight.zeros[int4_zero(kLayout, weight.rows, weight.groups, first_row_, group).word];
    if constexpr (kVectors) {
      const uint16_t *const scales =
          weight.scales + int4_scale(kLayout, weight.rows, weight.groups, first_row_, group);
      if constexpr (kRows == 4) {
        const uint2 both = *reinterpret_cast<const uint2 *>(scales);
        to.scales[0] = both.x;
        to.scales[1] = both.y;
      } else {
        to.scales[0] = *reinterpret_cast<const uint32_t *>(scales);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        to.scales[i] = weight.scales[int4_scale(kLayout, weight.rows, weight.groups,
                                                min(first_row_ + i, last_row_), group)];
    }
  }

  __device__ __forceinline__ void store(int k_tile, const Fetched (&fetched)[2]) {
    const bool same = group(k_tile * 2) == group(k_tile * 2 + 1);
    const bool exists = (k_tile * 2 + 1) * kStepK < args_.matmul.weight.cols;
    mbarrier_wait_parity(shared_.barrier(kWeightEmpty, state_.stage), state_.phase ^ 1);
    Int4Scale *const to = shared_.scales(state_.stage);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Int4Scale first = finish(fetched[0], i);
      Int4Scale second = first;
      if (!same) second = finish(fetched[1], i);
      // 0 past the last step, where the sums are 0.
      if (!exists) second.scale = 0;
      *reinterpret_cast<uint4 *>(to +
                                 Tile::Kind::template scale_index<Tile>(thread_ * kRows + i)) = {
          first.scale, first.minus_zero, second.scale, second.minus_zero};
    }
    mbarrier_arrive_warp(shared_.barrier(kWeightFull, state_.stage));
    if (first_) mbarrier_arrive_warp(shared_.first_scales());
    first_ = false;
    state_.advance();
  }

  // Of row i of this thread.
  __device__ __forceinline__ Int4Scale finish(const Fetched &fetched, int i) const {
    const Int4View &weight = args_.matmul.weight;
    uint32_t zero = kInt4SymmetricZero;
    if (weight.zeros != nullptr)
      zero = int4_zero_point(
          fetched.zeros >> int4_zero(Tile::Layout::kLayout, 0, 0, first_row_ + i, 0).shift,
          weight.zero_offset);
    const float minus_zero = -static_cast<float>(zero) * (1 / NibbleNumber<T>::kUnit);
    const uint16_t bits = fetched.scale(i);
    const float scale = weight.fp16_scales
                            ? to_float(*reinterpret_cast<const __half *>(&bits))
                            : to_float(*reinterpret_cast<const __nv_bfloat16 *>(&bits));
    return {scale_word(scale), pack_pair(T{}, minus_zero, minus_zero)};
  }
  static __device__ __forceinline__ uint32_t scale_word(float scale) {
    if constexpr (Tile::kScaleOn == ScaleOn::kSums) return __float_as_uint(scale);
    return pack_pair(T{}, scale, scale - to_float(from_float<T>(scale)));
  }

  const typename Tile::Args &args_;
  const SharedStorage<Tile> shared_;
  const int thread_;
  int64_t first_row_ = 0;
  int64_t last_row_ = 0;
  bool first_ = true;
  WeightPipelineState<Tile> state_;
};

}  // namespace
}  // namespace nf4::cuda
