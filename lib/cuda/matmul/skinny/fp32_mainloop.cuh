// The product of a warp tile in fp32, on tensor cores: x and the codebook are each a sum of two
// numbers of fp16, a high and a low part of 11 bits, over powers of two that bring their largest to
// 2^14. Three products of parts are summed; low times low is below fp32's rounding.
#pragma once

#include <cuda_runtime.h>

#include "cuda/matmul/skinny/mainloop.cuh"
#include "cuda/weight/split_lut.cuh"

namespace nf4::cuda {
namespace {

// x as B fragments of WarpMmaM8. A of a product has both parts of 8 rows of the weight, the high
// ones first, which are side by side in the LUT.
template <int MTiles>
struct WarpMmaFp32 {
  using Lut = SplitLut;
  using Rows = WarpMmaM8<__half, MTiles>;
  static constexpr int kMaxM = Rows::kMaxM;
  static constexpr bool kKeepsLane = true;
  uint32_t high[MTiles][32], low[MTiles][32];
  float unit[MTiles][2];  // of products with x, for the lane's columns of sums
  uint32_t lane_offset;   // in a tile, of the lane's first half chunk

  __device__ __forceinline__ WarpMmaFp32()
      : lane_offset(keep_in_register<kKeepsLane>(
            StageTile::offset(row(0), FragmentLane().thread_in_group / 2) +
            FragmentLane().thread_in_group % 2 * 8)) {}

  static __device__ __forceinline__ int row(int half) { return Rows::row(half); }
  static __device__ __forceinline__ int row_at(int fragment_row) {
    return Rows::row_at(fragment_row);
  }

  __device__ __forceinline__ void load_x(const MatmulArgs &matmul, int k_tile) {
    const FragmentLane lane;
    const int column = k_tile * kWarpTileK + lane.thread_in_group * 16;
#pragma unroll
    for (int m_tile = 0; m_tile < MTiles; ++m_tile) {
      const int m = m_tile * 8 + lane.group_id;
      const float *from = static_cast<const float *>(matmul.x) + m * matmul.x_stride + column;
      float4 x[16];
      float largest = 0;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int offset = i / 4 * kScaleK + i % 4 * 4;
        x[i] = {};
        if ((m < matmul.m) & (column + i / 4 * kScaleK < matmul.weight.cols))
          x[i] = *reinterpret_cast<const float4 *>(from + offset);
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(x[i].x), fabsf(x[i].y)),
                                       fmaxf(fabsf(x[i].z), fabsf(x[i].w))));
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const SplitUnit split(largest);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        split_pair(x[i].x, x[i].y, split.scale, high[m_tile][i * 2], low[m_tile][i * 2]);
        split_pair(x[i].z, x[i].w, split.scale, high[m_tile][i * 2 + 1], low[m_tile][i * 2 + 1]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        unit[m_tile][i] =
            multiply_rn(__shfl_sync(0xffffffffu, split.unit, (lane.thread_in_group * 2 + i) * 4),
                        SplitUnit::kToOne * SplitUnit::kToOne);
    }
  }

  // As WarpMmaM2::add.
  template <class FindScales>
  __device__ __forceinline__ void add(const StageTile &tile, SplitLut lut, FindScales find_scales,
                                      bool accumulate, float *partial) const {
    const FragmentLane lane;
    const float2 scales = find_scales();
    float sums[MTiles][4] = {};
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      float d[2][MTiles][4] = {};
      // The numbers of other blocks' chunks differ in bits 1 and 2.
      const uint2 w = tile.pair(lane_offset ^ block * 32);
      const uint2 w8 = tile.pair((lane_offset ^ block * 32) + 8 * (kWarpTileK / 2));
      mma_bytes<0>(lut, w.x, w8.x, block * 8, d);
      mma_bytes<2>(lut, w.x, w8.x, block * 8 + 2, d);
      mma_bytes<0>(lut, w.y, w8.y, block * 8 + 4, d);
      mma_bytes<2>(lut, w.y, w8.y, block * 8 + 6, d);
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
  __device__ __forceinline__ void mma_bytes(SplitLut lut, uint32_t word, uint32_t word8, int first,
                                            float (&d)[2][MTiles][4]) const {
    uint32_t a[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t from = half == 0 ? word : word8;
        const uint2 pair = i == 0 ? lut.pair<Byte>(from) : lut.pair<Byte + 1>(from);
        a[half][i * 2] = pair.x;
        a[half][i * 2 + 1] = pair.y;
      }
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        mma_m16n8k16(__half{}, d[half][m], a[half], low[m][first], low[m][first + 1]);
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        mma_m16n8k16(__half{}, d[half][m], a[half], high[m][first], high[m][first + 1]);
  }
};

}  // namespace

template <int MTiles>
constexpr int kWarpsOf<WarpMmaFp32<MTiles>> = kFp32Warps;

}  // namespace nf4::cuda
