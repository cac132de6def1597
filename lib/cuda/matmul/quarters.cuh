// A warp's product of a tile of the weight, 16 rows of a slice, with its part of x: what is
// done with the tile once it is in shared memory.
#pragma once

#include <cuda_runtime.h>

#include "core/decode.hpp"
#include "cuda/element.cuh"
#include "cuda/matmul/few_args.hpp"
#include "cuda/matmul/pairs.cuh"
#include "cuda/matmul/ring.cuh"
#include "cuda/ptx/mma.cuh"

namespace nf4::cuda {
namespace {

// Where a lane is in a fragment.
struct FragmentLane {
  int group;   // row of A, column of B
  int member;  // of the four lanes that share them
  __device__ __forceinline__ FragmentLane()
      : group(threadIdx.x % 32 / 4), member(threadIdx.x % 4) {}
};

// A number that depends on the lane alone. The compiler would find it anew for each tile; where
// there are registers it has to keep it.
template <bool Keep>
__device__ __forceinline__ uint32_t of_lane(uint32_t number) {
  if constexpr (Keep) asm volatile("" : "+r"(number));
  return number;
}

// 8 elements of x as pairs, or zeros.
template <class T>
__device__ __forceinline__ void load_pairs(const T *x, bool there, uint32_t *pairs) {
  uint4 v{};
  if (there) v = *reinterpret_cast<const uint4 *>(x);
  pairs[0] = v.x;
  pairs[1] = v.y;
  pairs[2] = v.z;
  pairs[3] = v.w;
}

// D += 8 columns of two rows of the weight times x, for each of Tiles tiles of 8 rows of x.
template <class T, int Tiles>
__device__ __forceinline__ void multiply_word(PairTable table, uint32_t word, uint32_t word8,
                                              const uint32_t (&x)[Tiles][32], int first_pair,
                                              float (&d)[Tiles][4]) {
  const uint32_t a[4] = {table.pair<0>(word), table.pair<0>(word8), table.pair<1>(word),
                         table.pair<1>(word8)};
  const uint32_t b[4] = {table.pair<2>(word), table.pair<2>(word8), table.pair<3>(word),
                         table.pair<3>(word8)};
#pragma unroll
  for (int i = 0; i < Tiles; ++i) {
    mma_m16n8k16(T{}, d[i], a, x[i][first_pair], x[i][first_pair + 1]);
    mma_m16n8k16(T{}, d[i], b, x[i][first_pair + 2], x[i][first_pair + 3]);
  }
}

// ---- Up to 2 rows of x -------------------------------------------------------------------
//
// Each lane of four has its own quarter of the slice. The 8 columns of B are 2 rows of x for
// each of the four, zero but in its columns, so that each lane's sums are of one block and it
// scales them itself.

template <class T>
struct OwnQuarters {
  static constexpr int kMaxM = 2;
  static constexpr bool kKeepsLane = true;  // there are registers for what depends on the lane
  uint32_t x[1][32];
  uint32_t place;  // in a tile, of the lane's first piece

  __device__ __forceinline__ OwnQuarters()
      : place(of_lane<kKeepsLane>(TileSlot::offset(row(0), FragmentLane().member * 2))) {}

  // The row of a tile that a group of lanes has, and the one 8 groups on.
  static __device__ __forceinline__ int row(int half) { return FragmentLane().group + half * 8; }
  static __device__ __forceinline__ int row_at(int place) { return place; }

  __device__ __forceinline__ void load_x(const MatmulArgs &args, int slice) {
    const FragmentLane lane;
    const int column = slice * kSlice + lane.member * kQuarter;
    const int m = static_cast<int>(args.m), row = lane.group % 2;
    const bool own = (lane.group / 2 == lane.member) & (row < m) & (column < args.cols);
    const T *from = static_cast<const T *>(args.x) + (row == 0 ? 0 : args.x_stride) + column;
#pragma unroll
    for (int i = 0; i < 8; ++i) load_pairs(from + i * 8, own, x[0] + i * 4);
  }

  // To partial[row][m], where `before` says that there is a sum already. `find_scales` gives the
  // scales of the lane's rows.
  template <class FindScales>
  __device__ __forceinline__ void add(const TileSlot &tile, PairTable table, FindScales find_scales,
                                      bool before, float *partial) const {
    const FragmentLane lane;
    float d[2][1][4] = {};  // two chains of products, which wait less for each other
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // The number of the second piece differs in its lowest bit.
      const uint4 w = tile.piece(place ^ i * 16);
      const uint4 w8 = tile.piece((place ^ i * 16) + 8 * (kSlice / 2));
      multiply_word<T>(table, w.x, w8.x, x, i * 16, d[0]);
      multiply_word<T>(table, w.y, w8.y, x, i * 16 + 4, d[1]);
      multiply_word<T>(table, w.z, w8.z, x, i * 16 + 8, d[0]);
      multiply_word<T>(table, w.w, w8.w, x, i * 16 + 12, d[1]);
    }
    const float2 scales = find_scales();
    float sums[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      sums[k] = multiply_rn(k < 2 ? scales.x : scales.y, d[0][0][k] + d[1][0][k]);
    // Each of the four lanes adds up one: of row group + 8 * (member / 2) and of row
    // member % 2 of x.
    const bool odd = lane.member % 2, upper = lane.member / 2;
    const float low =
        (odd ? sums[1] : sums[0]) + __shfl_xor_sync(0xffffffffu, odd ? sums[0] : sums[1], 1);
    const float high =
        (odd ? sums[3] : sums[2]) + __shfl_xor_sync(0xffffffffu, odd ? sums[2] : sums[3], 1);
    const float sum = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, 2);
    float &to = partial[(lane.group + lane.member / 2 * 8) * kMaxM + lane.member % 2];
    to = before ? to + sum : sum;
  }
};

// ---- Up to 8 or 16 rows of x -------------------------------------------------------------
//
// Four lanes share each quarter of a slice: 16 columns a lane.

template <class T, int Tiles>
struct SharedQuarters {
  static constexpr int kMaxM = 8 * Tiles;
  static constexpr bool kKeepsLane = false;
  uint32_t x[Tiles][32];

  // Even rows before odd ones, so that the rows that half a warp reads at a time are in
  // different banks.
  static __device__ __forceinline__ int row(int half) {
    return row_at(FragmentLane().group + half * 8);
  }
  static __device__ __forceinline__ int row_at(int place) {
    return (place % 4 * 2 + place / 4 % 2) + place / 8 * 8;
  }

  __device__ __forceinline__ void load_x(const MatmulArgs &args, int slice) {
    const FragmentLane lane;
    const int column = slice * kSlice + lane.member * 16;
#pragma unroll
    for (int of_x = 0; of_x < Tiles; ++of_x) {
      const int m = of_x * 8 + lane.group;
      const T *from = static_cast<const T *>(args.x) + m * args.x_stride + column;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        load_pairs(from + i / 2 * kQuarter + i % 2 * 8,
                   (m < args.m) & (column + i / 2 * kQuarter < args.cols), x[of_x] + i * 4);
    }
  }

  // To partial[row][m], where `before` says that there is a sum already. `find_scales` gives the
  // scales of the lane's rows.
  template <class FindScales>
  __device__ __forceinline__ void add(const TileSlot &tile, PairTable table, FindScales find_scales,
                                      bool before, float *partial) const {
    const FragmentLane lane;
    const float2 scales = find_scales();
    float sums[Tiles][4] = {};
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      float d[Tiles][4] = {};
      const uint2 w = tile.half_piece(row(0), quarter * 2 + lane.member / 2, lane.member % 2);
      const uint2 w8 = tile.half_piece(row(1), quarter * 2 + lane.member / 2, lane.member % 2);
      multiply_word<T>(table, w.x, w8.x, x, quarter * 8, d);
      multiply_word<T>(table, w.y, w8.y, x, quarter * 8 + 4, d);
      const float of_row = __shfl_sync(0xffffffffu, scales.x, quarter, 4);
      const float of_row8 = __shfl_sync(0xffffffffu, scales.y, quarter, 4);
#pragma unroll
      for (int i = 0; i < Tiles; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          sums[i][k] = __fmaf_rn(k < 2 ? of_row : of_row8, d[i][k], sums[i][k]);
    }
#pragma unroll
    for (int i = 0; i < Tiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 &to = *reinterpret_cast<float2 *>(partial + (lane.group + half * 8) * kMaxM + i * 8 +
                                                 lane.member * 2);
        const float2 sum{sums[i][half * 2], sums[i][half * 2 + 1]};
        to = before ? float2{to.x + sum.x, to.y + sum.y} : sum;
      }
  }
};

}  // namespace
}  // namespace nf4::cuda
