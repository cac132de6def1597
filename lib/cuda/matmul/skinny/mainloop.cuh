// A warp's product of a warp tile, 16 rows by 256 columns of a weight with a codebook, with its
// part of x in 16 bits: the work on the tile once it is in shared memory.
#pragma once

#include <cuda_runtime.h>

#include "core/decode.hpp"
#include "cuda/arch.cuh"
#include "cuda/element.cuh"
#include "cuda/matmul/skinny/args.hpp"
#include "cuda/matmul/skinny/pipeline.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/weight/byte_lut.cuh"

namespace nf4::cuda {
namespace {

// The place of a lane in an mma fragment, in the words of the PTX ISA.
struct FragmentLane {
  int group_id;         // row of A, column of B
  int thread_in_group;  // number among the four lanes that share them
  __device__ __forceinline__ FragmentLane()
      : group_id(threadIdx.x % 32 / 4), thread_in_group(threadIdx.x % 4) {}
};

// A number that depends only on the lane. The compiler would recompute it for each tile; with Keep,
// if there are registers, it must not.
template <bool Keep>
__device__ __forceinline__ uint32_t keep_in_register(uint32_t number) {
  if constexpr (Keep) asm volatile("" : "+r"(number));
  return number;
}

// Returns the start of row m of x. A type in place of MatmulArgs may find the rows in another way.
template <class T>
struct XRow {
  const T *data;
  bool exists;
};
template <class T, class View>
__device__ __forceinline__ XRow<T> x_row(const MatmulArgsOf<View> &matmul, int m) {
  return {static_cast<const T *>(matmul.x) + m * matmul.x_stride, m < matmul.m};
}
template <class View>
__device__ __forceinline__ int64_t x_cols(const MatmulArgsOf<View> &matmul) {
  return matmul.weight.cols;
}
// The start of x, which can always be read.
template <class T, class View>
__device__ __forceinline__ const T *x_start(const MatmulArgsOf<View> &matmul) {
  return static_cast<const T *>(matmul.x);
}

// Loads 8 elements of x as B fragments, or zeros.
template <class T>
__device__ __forceinline__ void load_b(const T *x, bool in_bounds, uint32_t *b) {
  uint4 v{};
  if (in_bounds) v = *reinterpret_cast<const uint4 *>(x);
  b[0] = v.x;
  b[1] = v.y;
  b[2] = v.z;
  b[3] = v.w;
}

// D += 8 columns of two rows of the weight times x, for each of MTiles tiles of 8 rows of x.
template <class T, class Arch = Sm80, class Pairs, int MTiles>
__device__ __forceinline__ void mma_word(Pairs pairs, Pairs pairs8, uint32_t word, uint32_t word8,
                                         const uint32_t (&x)[MTiles][32], int first,
                                         float (&d)[MTiles][4]) {
  const uint32_t a0[4] = {pairs.template pair<0>(word), pairs8.template pair<0>(word8),
                          pairs.template pair<1>(word), pairs8.template pair<1>(word8)};
  const uint32_t a1[4] = {pairs.template pair<2>(word), pairs8.template pair<2>(word8),
                          pairs.template pair<3>(word), pairs8.template pair<3>(word8)};
#pragma unroll
  for (int i = 0; i < MTiles; ++i) {
    mma_m16n8k16_on<Arch>(T{}, d[i], a0, x[i][first], x[i][first + 1]);
    mma_m16n8k16_on<Arch>(T{}, d[i], a1, x[i][first + 2], x[i][first + 3]);
  }
}
template <class T, class Arch = Sm80, class Pairs, int MTiles>
__device__ __forceinline__ void mma_word(Pairs pairs, uint32_t word, uint32_t word8,
                                         const uint32_t (&x)[MTiles][32], int first,
                                         float (&d)[MTiles][4]) {
  mma_word<T, Arch>(pairs, pairs, word, word8, x, first, d);
}

// Four lanes have sums of two rows of the weight and two of x. Each lane adds up one output: of row
// group_id + 8 * (thread_in_group / 2), and of row thread_in_group % 2 of x.
__device__ __forceinline__ void store_quad_sums(const float (&sums)[4], bool accumulate,
                                                float *partial) {
  const FragmentLane lane;
  const bool odd = lane.thread_in_group % 2, upper = lane.thread_in_group / 2;
  const float low =
      (odd ? sums[1] : sums[0]) + __shfl_xor_sync(0xffffffffu, odd ? sums[0] : sums[1], 1);
  const float high =
      (odd ? sums[3] : sums[2]) + __shfl_xor_sync(0xffffffffu, odd ? sums[2] : sums[3], 1);
  const float sum = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, 2);
  float &to =
      partial[(lane.group_id + lane.thread_in_group / 2 * 8) * 2 + lane.thread_in_group % 2];
  to = accumulate ? to + sum : sum;
}

// The same for fragments of MTiles tiles of 8 rows of x, whose lanes have different outputs.
template <int MTiles>
__device__ __forceinline__ void store_sums(FragmentLane lane, const float (&sums)[MTiles][4],
                                           bool accumulate, float *partial) {
#pragma unroll
  for (int i = 0; i < MTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 &to = *reinterpret_cast<float2 *>(partial + (lane.group_id + half * 8) * 8 * MTiles +
                                               i * 8 + lane.thread_in_group * 2);
      const float2 sum{sums[i][half * 2], sums[i][half * 2 + 1]};
      to = accumulate ? float2{to.x + sum.x, to.y + sum.y} : sum;
    }
}

// ---- Up to 2 rows of x -------------------------------------------------------------------
//
// Each lane of four has kScaleK columns of its own. The 8 columns of B are 2 rows of x for each of
// the four lanes, zero except in the lane's own columns, so that a lane's sums have one scale,
// which the lane itself applies.

template <class T, class Arch = Sm80>
struct WarpMmaM2 {
  using Lut = ByteLut;
  static constexpr int kMaxM = 2;
  // There are registers for numbers that depend on the lane.
  static constexpr bool kKeepsLane = true;
  static constexpr bool kLoadsAhead = false;
  uint32_t x[1][32];
  uint32_t lane_offset;  // offset of the lane's first chunk in a tile

  __device__ __forceinline__ WarpMmaM2()
      : lane_offset(keep_in_register<kKeepsLane>(
            StageTile::offset(row(0), FragmentLane().thread_in_group * 2))) {}

  // The rows of a tile that a group of lanes has: this one and that of fragment row group_id + 8.
  static __device__ __forceinline__ int row(int half) { return FragmentLane().group_id + half * 8; }
  static __device__ __forceinline__ int row_at(int fragment_row) { return fragment_row; }

  template <class X>
  __device__ __forceinline__ void load_x(const X &from, int k_tile) {
    const FragmentLane lane;
    const int column = k_tile * kWarpTileK + lane.thread_in_group * kScaleK;
    const XRow<T> row = x_row<T>(from, lane.group_id % 2);
    const bool own =
        (lane.group_id / 2 == lane.thread_in_group) & row.exists & (column < x_cols(from));
#pragma unroll
    for (int i = 0; i < 8; ++i) load_b(row.data + column + i * 8, own, x[0] + i * 4);
  }

  __device__ __forceinline__ void prepare_x() const {}

  // Adds to partial[row][m], or sets it if `accumulate` is false. find_scales() returns the scales
  // of the lane's rows.
  template <class Tile, class AnyLut, class FindScales>
  __device__ __forceinline__ void add(const Tile &tile, AnyLut lut, FindScales find_scales,
                                      bool accumulate, float *partial) const {
    const FragmentLane lane;
    float d[2][1][4] = {};  // two chains of products, which wait less for each other
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 w = words(tile, i, 0), w8 = words(tile, i, 1);
      mma_word<T, Arch>(lut, w.x, w8.x, x, i * 16, d[0]);
      mma_word<T, Arch>(lut, w.y, w8.y, x, i * 16 + 4, d[1]);
      mma_word<T, Arch>(lut, w.z, w8.z, x, i * 16 + 8, d[0]);
      mma_word<T, Arch>(lut, w.w, w8.w, x, i * 16 + 12, d[1]);
    }
    const float2 scales = find_scales();
    float sums[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      sums[k] = multiply_rn(k < 2 ? scales.x : scales.y, d[0][0][k] + d[1][0][k]);
    store_quad_sums(sums, accumulate, partial);
  }

  // The words of a lane where they go to registers: two chunks of each of its rows.
  using Words = uint4;
  static __device__ __forceinline__ int word_offset(int i) {
    return FragmentLane().thread_in_group * 32 + i * 16;
  }

 protected:
  // The number of the second chunk differs in its lowest bit.
  __device__ __forceinline__ uint4 words(const StageTile &tile, int i, int half) const {
    return tile.chunk((lane_offset ^ i * 16) + half * 8 * (kWarpTileK / 2));
  }
  static __device__ __forceinline__ uint4 words(const LaneTile<uint4> &tile, int i, int half) {
    return tile.words[half][i];
  }
};

// ---- Up to 8 or 16 rows of x -------------------------------------------------------------
//
// Four lanes share each kScaleK columns: 16 columns per lane.

template <class T, int MTiles, class Arch = Sm80>
struct WarpMmaM8 {
  using Lut = ByteLut;
  static constexpr int kMaxM = 8 * MTiles;
  static constexpr bool kKeepsLane = false;
  static constexpr bool kLoadsAhead = false;
  uint32_t x[MTiles][32];

  // Even rows come before odd ones, so that the rows that half a warp reads at a time are in
  // different banks.
  static __device__ __forceinline__ int row(int half) {
    return row_at(FragmentLane().group_id + half * 8);
  }
  static __device__ __forceinline__ int row_at(int fragment_row) {
    return (fragment_row % 4 * 2 + fragment_row / 4 % 2) + fragment_row / 8 * 8;
  }

  template <class X>
  __device__ __forceinline__ void load_x(const X &from, int k_tile) {
    const FragmentLane lane;
    const int column = k_tile * kWarpTileK + lane.thread_in_group * 16;
#pragma unroll
    for (int m_tile = 0; m_tile < MTiles; ++m_tile) {
      const XRow<T> row = x_row<T>(from, m_tile * 8 + lane.group_id);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        load_b(row.data + column + i / 2 * kScaleK + i % 2 * 8,
               row.exists & (column + i / 2 * kScaleK < x_cols(from)), x[m_tile] + i * 4);
    }
  }

  __device__ __forceinline__ void prepare_x() const {}

  // See WarpMmaM2::add.
  template <class Tile, class AnyLut, class FindScales>
  __device__ __forceinline__ void add(const Tile &tile, AnyLut lut, FindScales find_scales,
                                      bool accumulate, float *partial) const {
    const FragmentLane lane;
    const float2 scales = find_scales();
    float sums[MTiles][4] = {};
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      float d[MTiles][4] = {};
      const uint2 w = words(tile, block, 0), w8 = words(tile, block, 1);
      mma_word<T, Arch>(lut, w.x, w8.x, x, block * 8, d);
      mma_word<T, Arch>(lut, w.y, w8.y, x, block * 8 + 4, d);
      const float scale = __shfl_sync(0xffffffffu, scales.x, block, 4);
      const float scale8 = __shfl_sync(0xffffffffu, scales.y, block, 4);
#pragma unroll
      for (int i = 0; i < MTiles; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          sums[i][k] = __fmaf_rn(k < 2 ? scale : scale8, d[i][k], sums[i][k]);
    }
    store_sums(lane, sums, accumulate, partial);
  }

  // The words of a lane where they go to registers: half a chunk of each block of its rows.
  using Words = uint2;
  static __device__ __forceinline__ int word_offset(int block) {
    return block * (kScaleK / 2) + FragmentLane().thread_in_group * 8;
  }

 protected:
  static __device__ __forceinline__ uint2 words(const StageTile &tile, int block, int half) {
    const int t = FragmentLane().thread_in_group;
    return tile.half_chunk(row(half), block * 2 + t / 2, t % 2);
  }
  static __device__ __forceinline__ uint2 words(const LaneTile<uint2> &tile, int block, int half) {
    return tile.words[half][block];
  }
};

// ---- Less shared memory ------------------------------------------------------------------

// The same in a CTA of a layout with a narrow LUT and fewer warps. So there are registers for two
// K-tiles of x: the next one is loaded while this one is multiplied. With 16 rows of x this is
// slower.
template <class WideMma, int kLayout>
struct NarrowMma : WideMma {
  using Lut = NarrowByteLut;
  static constexpr bool kKeepsLane = true;
  static constexpr bool kLoadsAhead = WideMma::kMaxM < 16;
  WideMma loaded;

  template <class X>
  __device__ __forceinline__ void load_x(const X &from, int k_tile) {
    loaded.load_x(from, k_tile);
  }
  __device__ __forceinline__ void prepare_x() { static_cast<WideMma &>(*this) = loaded; }
};

}  // namespace

template <class WideMma, int kLayout>
constexpr SkinnyLayout kLayoutOf<NarrowMma<WideMma, kLayout>> = kSkinnyLayouts[kLayout];

}  // namespace nf4::cuda
