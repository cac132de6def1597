// The product of a warp tile in fp32, on tensor cores. x and the codebook are each a sum of two
// fp16 numbers, a high and a low part, over powers of two that bring the largest to [2^14, 2^15).
// All four products of parts are summed.
//
// Cost: the look-ups read twice the bytes of 16 bits, 128 cycles of shared memory for a warp tile,
// and 32 to 128 mma; these are the bound. docs/design/matmul-skinny.md, "fp32", has the
// experiments.
#pragma once

#include <cuda_runtime.h>

#include "cuda/matmul/skinny/mainloop.cuh"
#include "cuda/weight/split_lut.cuh"

namespace nf4::cuda {
namespace {

// The parts of the entries of bytes Byte and Byte + 1, as A of a product: the high parts of 8 rows
// of the weight, then their low parts, which lie side by side in the LUT.
template <int Byte>
__device__ __forceinline__ void split_a(SplitLut lut, uint32_t word, uint32_t (&a)[4]) {
  const uint2 first = lut.pair<Byte>(word), second = lut.pair<Byte + 1>(word);
  a[0] = first.x;
  a[1] = first.y;
  a[2] = second.x;
  a[3] = second.y;
}

// The place of a lane's 16 columns of a block in a tile, as in WarpMmaM8; the places in other
// blocks differ in two bits.
__device__ __forceinline__ uint32_t split_lane_offset(int row) {
  const int t = FragmentLane().thread_in_group;
  return keep_in_register<true>(StageTile::offset(row, t / 2) + t % 2 * 8);
}

// Loads 64 columns of a row of x, or zeros: 16 in each block.
__device__ __forceinline__ void load_fp32_x(const MatmulArgs &matmul, int k_tile, int m,
                                            bool in_bounds, uint4 (&x)[16]) {
  const int column = k_tile * kWarpTileK + FragmentLane().thread_in_group * 16;
  const float *from = static_cast<const float *>(matmul.x) + m * matmul.x_stride + column;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    x[i] = {};
    if (in_bounds & (column + i / 4 * kScaleK < matmul.weight.cols))
      x[i] = *reinterpret_cast<const uint4 *>(from + i / 4 * kScaleK + i % 4 * 4);
  }
}

// The power of two of the row of x that a quad has.
__device__ __forceinline__ SplitUnit quad_unit(const uint4 (&x)[16]) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i)
    largest = fmaxf(largest,
                    fmaxf(fmaxf(fabsf(__uint_as_float(x[i].x)), fabsf(__uint_as_float(x[i].y))),
                          fmaxf(fabsf(__uint_as_float(x[i].z)), fabsf(__uint_as_float(x[i].w)))));
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  return SplitUnit(fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2)));
}

// The unit of products with the row of x of lane `lane`.
__device__ __forceinline__ float product_unit(SplitUnit split, int lane) {
  return multiply_rn(__shfl_sync(0xffffffffu, split.unit, lane),
                     SplitUnit::kToOne * SplitUnit::kToOne);
}

// ---- Up to 2 rows of x -------------------------------------------------------------------
//
// Columns 0 and 1 of B are the high parts of x, and 4 and 5 the low ones: one product for all four.

struct WarpMmaFp32M2 {
  using Lut = SplitLut;
  static constexpr int kMaxM = 2;
  static constexpr bool kKeepsLane = true;
  static constexpr bool kLoadsAhead = false;
  uint4 loaded[16];
  uint32_t x[32];
  float unit[2];
  uint32_t lane_offset;

  __device__ __forceinline__ WarpMmaFp32M2() : lane_offset(split_lane_offset(row(0))) {}

  static __device__ __forceinline__ int row(int half) { return WarpMmaM8<__half, 1>::row(half); }
  static __device__ __forceinline__ int row_at(int fragment_row) {
    return WarpMmaM8<__half, 1>::row_at(fragment_row);
  }

  __device__ __forceinline__ void load_x(const MatmulArgs &matmul, int k_tile) {
    const int m = FragmentLane().group_id % 4;
    load_fp32_x(matmul, k_tile, m, (m < 2) & (m < matmul.m), loaded);
  }
  __device__ __forceinline__ void prepare_x() {
    const FragmentLane lane;
    const SplitUnit split = quad_unit(loaded);
    const bool is_low = lane.group_id >= 4;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      uint32_t high[2], low[2];
      split_pair(__uint_as_float(loaded[i].x), __uint_as_float(loaded[i].y), split.scale, high[0],
                 low[0]);
      split_pair(__uint_as_float(loaded[i].z), __uint_as_float(loaded[i].w), split.scale, high[1],
                 low[1]);
      x[i * 2] = is_low ? low[0] : high[0];
      x[i * 2 + 1] = is_low ? low[1] : high[1];
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) unit[m] = product_unit(split, m * 4);
  }

  // See WarpMmaM2::add.
  template <class FindScales>
  __device__ __forceinline__ void add(const StageTile &tile, SplitLut lut, FindScales find_scales,
                                      bool accumulate, float *partial) const {
    const FragmentLane lane;
    const float2 scales = find_scales();
    float sums[2][2] = {};
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      float d[2][4] = {};
      const uint2 w = tile.pair(lane_offset ^ block * 32);
      const uint2 w8 = tile.pair((lane_offset ^ block * 32) + 8 * (kWarpTileK / 2));
      mma_bytes<0>(lut, w.x, w8.x, block * 8, d);
      mma_bytes<2>(lut, w.x, w8.x, block * 8 + 2, d);
      mma_bytes<0>(lut, w.y, w8.y, block * 8 + 4, d);
      mma_bytes<2>(lut, w.y, w8.y, block * 8 + 6, d);
      const float scale[2] = {__shfl_sync(0xffffffffu, scales.x, block, 4),
                              __shfl_sync(0xffffffffu, scales.y, block, 4)};
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int m = 0; m < 2; ++m)
          sums[half][m] = __fmaf_rn(scale[half], multiply_rn(d[half][m] + d[half][m + 2], unit[m]),
                                    sums[half][m]);
    }
    store(lane, sums, accumulate, partial);
  }

 private:
  template <int Byte>
  __device__ __forceinline__ void mma_bytes(SplitLut lut, uint32_t word, uint32_t word8, int first,
                                            float (&d)[2][4]) const {
    uint32_t a[2][4];
    split_a<Byte>(lut, word, a[0]);
    split_a<Byte>(lut, word8, a[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      mma_m16n8k16(__half{}, d[half], a[half], x[first], x[first + 1]);
  }

  // Lane 0 of a quad has the sums of high parts of x, and lane 2 those of low parts. Lane 0 stores
  // the sums of a tile's upper rows, and lane 2 those of the lower rows.
  static __device__ __forceinline__ void store(FragmentLane lane, const float (&sums)[2][2],
                                               bool accumulate, float *partial) {
    const int half = lane.thread_in_group / 2;
    float2 sum;
    sum.x = (half ? sums[1][0] : sums[0][0]) +
            __shfl_xor_sync(0xffffffffu, half ? sums[0][0] : sums[1][0], 2);
    sum.y = (half ? sums[1][1] : sums[0][1]) +
            __shfl_xor_sync(0xffffffffu, half ? sums[0][1] : sums[1][1], 2);
    if (lane.thread_in_group % 2 != 0) return;
    float2 &to = *reinterpret_cast<float2 *>(partial + (lane.group_id + half * 8) * 2);
    to = accumulate ? float2{to.x + sum.x, to.y + sum.y} : sum;
  }
};

// ---- Up to 8 or 16 rows of x -------------------------------------------------------------

template <int MTiles>
struct WarpMmaFp32 {
  using Lut = SplitLut;
  using Rows = WarpMmaM8<__half, MTiles>;
  static constexpr int kMaxM = Rows::kMaxM;
  static constexpr bool kKeepsLane = true;
  static constexpr bool kLoadsAhead = false;
  uint4 x[MTiles][16];  // first as loaded; then high parts of two pairs of columns, then low parts
  float unit[MTiles][2];  // for products with x, for the lane's columns of sums
  uint32_t lane_offset;

  __device__ __forceinline__ WarpMmaFp32() : lane_offset(split_lane_offset(row(0))) {}

  static __device__ __forceinline__ int row(int half) { return Rows::row(half); }
  static __device__ __forceinline__ int row_at(int fragment_row) {
    return Rows::row_at(fragment_row);
  }

  __device__ __forceinline__ void load_x(const MatmulArgs &matmul, int k_tile) {
#pragma unroll
    for (int i = 0; i < MTiles; ++i) {
      const int m = i * 8 + FragmentLane().group_id;
      load_fp32_x(matmul, k_tile, m, m < matmul.m, x[i]);
    }
  }
  __device__ __forceinline__ void prepare_x() {
#pragma unroll
    for (int i = 0; i < MTiles; ++i) {
      const SplitUnit split = quad_unit(x[i]);
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        const uint4 v = x[i][k];
        split_pair(__uint_as_float(v.x), __uint_as_float(v.y), split.scale, x[i][k].x, x[i][k].z);
        split_pair(__uint_as_float(v.z), __uint_as_float(v.w), split.scale, x[i][k].y, x[i][k].w);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m)
        unit[i][m] = product_unit(split, (FragmentLane().thread_in_group * 2 + m) * 4);
    }
  }

  // See WarpMmaM2::add.
  template <class FindScales>
  __device__ __forceinline__ void add(const StageTile &tile, SplitLut lut, FindScales find_scales,
                                      bool accumulate, float *partial) const {
    const FragmentLane lane;
    const float2 scales = find_scales();
    float sums[MTiles][4] = {};
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      float d[2][MTiles][4] = {};
      const uint2 w = tile.pair(lane_offset ^ block * 32);
      const uint2 w8 = tile.pair((lane_offset ^ block * 32) + 8 * (kWarpTileK / 2));
      mma_bytes<0>(lut, w.x, w8.x, block * 4, d);
      mma_bytes<2>(lut, w.x, w8.x, block * 4 + 1, d);
      mma_bytes<0>(lut, w.y, w8.y, block * 4 + 2, d);
      mma_bytes<2>(lut, w.y, w8.y, block * 4 + 3, d);
      const float scale[2] = {__shfl_sync(0xffffffffu, scales.x, block, 4),
                              __shfl_sync(0xffffffffu, scales.y, block, 4)};
#pragma unroll
      for (int m = 0; m < MTiles; ++m)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float sum = d[k / 2][m][k % 2] + d[k / 2][m][k % 2 + 2];
          sums[m][k] = __fmaf_rn(scale[k / 2], multiply_rn(sum, unit[m][k % 2]), sums[m][k]);
        }
    }
    store_sums(lane, sums, accumulate, partial);
  }

 private:
  // D += the columns of bytes Byte and Byte + 1 of words of two rows.
  template <int Byte>
  __device__ __forceinline__ void mma_bytes(SplitLut lut, uint32_t word, uint32_t word8, int k,
                                            float (&d)[2][MTiles][4]) const {
    uint32_t a[2][4];
    split_a<Byte>(lut, word, a[0]);
    split_a<Byte>(lut, word8, a[1]);
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        mma_m16n8k16(__half{}, d[half][m], a[half], x[m][k].z, x[m][k].w);
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        mma_m16n8k16(__half{}, d[half][m], a[half], x[m][k].x, x[m][k].y);
  }
};

}  // namespace

// 16 rows of x in fp32 take more registers.
template <>
constexpr SkinnyLayout kLayoutOf<WarpMmaFp32<2>> = kFp32M16Layout;

}  // namespace nf4::cuda
