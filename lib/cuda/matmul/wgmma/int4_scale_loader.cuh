// The two producer warps that load the scales and zeros of integer weights, turn them into the form
// that decoding needs, and store them by K-tiles.
#pragma once

#include <cstdint>

#include "core/int4.hpp"
#include "cuda/arch.cuh"
#include "cuda/element.cuh"
#include "cuda/matmul/wgmma/scheduler.cuh"
#include "cuda/matmul/wgmma/shared.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/weight/int4_decode.cuh"
#include "cuda/weight/int4_scale.cuh"

namespace nf4::cuda {
namespace {

// Finds a thread's scales and zeros of a work tile, group after group: those of kRows neighbouring
// rows. The zeros are in one word; scales are in one vector if groups are rows.
template <class Layout, int kRows>
class Int4GroupCursor {
 public:
  // Nothing waits for the loads before the members are used.
  struct Fetched {
    uint32_t zeros;
    uint32_t scales[Layout::kScalesByGroup ? kRows / 2 : kRows];

    __device__ __forceinline__ uint16_t scale(int i) const {
      return static_cast<uint16_t>(Layout::kScalesByGroup ? scales[i / 2] >> i % 2 * 16
                                                          : scales[i]);
    }
  };

  // Past the last row it uses those of the last row. `expert` is the index in a stack of such
  // weights.
  __device__ __forceinline__ Int4GroupCursor(const Int4View &weight, int row, int64_t n_end,
                                             int group, int expert)
      : weight_(weight) {
    const int last = static_cast<int>(n_end) - (Layout::kScalesByGroup ? kRows : 1);
    row = min(row, last);
    last_row_ = last - row;
    scales_ = weight.scales + expert * weight.rows * weight.groups +
              int4_scale(Layout::kLayout, weight.rows, weight.groups, row, group);
    const Int4Place zero = int4_zero(Layout::kLayout, weight.rows, weight.groups, row, group);
    zeros_ = weight.zeros + expert * int4_zero_words(weight.rows, weight.groups) + zero.word;
    zero_shift_ = zero.shift;
  }

  __device__ __forceinline__ Fetched fetch() const {
    Fetched to;
    to.zeros = weight_.zeros != nullptr ? *zeros_ : 0;
    if constexpr (!Layout::kScalesByGroup) {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        to.scales[i] = scales_[min(i, last_row_) * static_cast<int>(weight_.groups)];
    } else if constexpr (kRows == 4) {
      const uint2 both = *reinterpret_cast<const uint2 *>(scales_);
      to.scales[0] = both.x;
      to.scales[1] = both.y;
    } else {
      to.scales[0] = *reinterpret_cast<const uint32_t *>(scales_);
    }
    return to;
  }
  // Prefetches into L2, which is allowed while the predecessor still writes.
  __device__ __forceinline__ void prefetch() const {
    if (weight_.zeros != nullptr) prefetch_l2_sector(zeros_);
#pragma unroll
    for (int i = 0; i < (Layout::kScalesByGroup ? 1 : kRows); ++i)
      prefetch_l2_sector(scales_ + min(i, last_row_) * static_cast<int>(weight_.groups));
  }

  __device__ __forceinline__ void advance() {
    scales_ += Layout::kScalesByGroup ? static_cast<int>(weight_.rows) : 1;
    zeros_ += Layout::kScalesByGroup ? static_cast<int>(weight_.rows) / kInt4PerWord : 1;
  }

  // The zero point of row i.
  __device__ __forceinline__ uint32_t zero(const Fetched &from, int i) const {
    return weight_.zeros != nullptr ? int4_zero_word(from.zeros, weight_.zero_offset) >>
                                              zero_shift_ >> Layout::zero_shift(i) &
                                          15u
                                    : kInt4SymmetricZero;
  }

 private:
  const Int4View &weight_;
  const uint16_t *scales_;
  const uint32_t *zeros_;
  int zero_shift_;
  int last_row_;  // relative to the first
};

// T is the type of x. kScaleThreads threads call it, numbered by `thread`.
template <class T, class Tile>
class Int4ScaleLoader {
 public:
  static constexpr int kRows = Tile::kTileN / kScaleThreads;  // per thread

  __device__ __forceinline__ Int4ScaleLoader(const typename Tile::Args &args,
                                             SharedStorage<Tile> shared, int thread)
      : args_(args), shared_(shared), thread_(thread) {}

  __device__ __forceinline__ void load(const WorkTile &work, int64_t n_end, int expert) {
    if (args_.decode.group_steps % 2 == 0)
      load_groups<1>(work, n_end, expert);
    else
      load_groups<2>(work, n_end, expert);
  }

 private:
  using Cursor = Int4GroupCursor<typename Tile::Layout, kRows>;
  using Fetched = typename Cursor::Fetched;
  // Groups is the number of groups that a K-tile may have.
  template <int Groups>
  __device__ __forceinline__ void load_groups(const WorkTile &work, int64_t n_end, int expert) {
    constexpr int kSteps = 2 / Groups;  // steps that share a load
    // The number of K-tiles between load and use. Scales that lie by rows share sectors with those
    // of the next groups.
    constexpr int kAhead = (Tile::Layout::kScalesByGroup ? 4 : 2) / Groups;
    const int group_steps = args_.decode.group_steps, group = work.k_tile * 2 / group_steps;
    Cursor cursor(args_.matmul.weight, work.n + thread_ * kRows, n_end, group, expert);
    int left = (group + 1) * group_steps - work.k_tile * 2;  // steps left in the group
    int loads = (min(work.k_tile_end * 2, static_cast<int>(args_.matmul.weight.cols / kStepK)) +
                 kSteps - 1) /
                    kSteps -
                work.k_tile * Groups;
    if (first_) {
      cursor.prefetch();
      pdl_wait<Sm90>();
    }
    Fetched fetched[kAhead][Groups];
    const auto fetch = [&](Fetched(&to)[Groups]) {
#pragma unroll
      for (Fetched &each : to) {
        if (--loads < 0) break;
        each = cursor.fetch();
        left -= kSteps;
        if (left > 0) continue;
        cursor.advance();
        left = group_steps;
      }
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fetch(fetched[i]);
#pragma unroll 1
    for (int k_tile = work.k_tile; k_tile < work.k_tile_end; k_tile += kAhead)
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (k_tile + i >= work.k_tile_end) break;
        store(cursor, k_tile + i, fetched[i][0], fetched[i][Groups - 1]);
        fetch(fetched[i]);
      }
  }

  __device__ __forceinline__ void store(const Cursor &cursor, int k_tile, const Fetched &first,
                                        const Fetched &second) {
    // Past the last step the scale is 0, as the sums are.
    const bool exists = (k_tile * 2 + 1) * kStepK < args_.matmul.weight.cols;
    mbarrier_wait_parity(shared_.barrier(kWeightEmpty, state_.stage), state_.phase ^ 1);
    Int4Scale *const to = shared_.scales(state_.stage);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Int4Scale a = finish(cursor, first, i);
      const Int4Scale b = &second == &first ? a : finish(cursor, second, i);
      *reinterpret_cast<uint4 *>(to +
                                 Tile::Kind::template scale_index<Tile>(thread_ * kRows + i)) = {
          a.scale, a.minus_zero, exists ? b.scale : 0, b.minus_zero};
    }
    mbarrier_arrive_warp(shared_.barrier(kWeightFull, state_.stage));
    if (first_) mbarrier_arrive_warp(shared_.first_scales());
    first_ = false;
    state_.advance();
  }

  // Returns the scale of row i of this thread.
  __device__ __forceinline__ Int4Scale finish(const Cursor &cursor, const Fetched &fetched,
                                              int i) const {
    const Int4View &weight = args_.matmul.weight;
    const float minus_zero =
        static_cast<float>(cursor.zero(fetched, i)) * (-1 / NibbleNumber<T>::kUnit);
    const float scale = scale_to_float(weight.fp16_scales, fetched.scale(i));
    return {scale_word(scale), pack_pair(T{}, minus_zero, minus_zero)};
  }
  static __device__ __forceinline__ uint32_t scale_word(float scale) {
    if constexpr (Tile::kScaleOn == ScaleOn::kSums) return __float_as_uint(scale);
    return pack_pair(T{}, scale, scale - to_float(from_float<T>(scale)));
  }

  const typename Tile::Args &args_;
  const SharedStorage<Tile> shared_;
  const int thread_;
  bool first_ = true;
  WeightPipelineState<Tile> state_;
};

}  // namespace
}  // namespace nf4::cuda
