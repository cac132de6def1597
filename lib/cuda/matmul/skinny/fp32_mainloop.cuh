// The product of a warp tile in fp32, on tensor cores: x and the codebook are each a sum of two
// numbers of fp16, a high and a low part of 11 bits, over powers of two that bring their largest to
// 2^14. Three products of parts are summed; low times low is below fp32's rounding.
#pragma once

#include <cuda_runtime.h>

#include "cuda/matmul/skinny/mainloop.cuh"
#include "cuda/weight/split_lut.cuh"

namespace nf4::cuda {
namespace {

// The fragments of a lane: WarpMmaM8's. 16 rows of x take two passes over the rows of a CTA, each
// with half of the columns of a K-tile, as registers hold no more of x.
template <int MTiles>
struct WarpMmaFp32 {
  using Lut = SplitLut;
  using Rows = WarpMmaM8<__half, MTiles>;
  static constexpr int kMaxM = Rows::kMaxM;
  static constexpr bool kKeepsLane = false;
  static constexpr int kPasses = MTiles;
  static constexpr int kBlocks = 4 / kPasses;  // of kScaleK columns, in a pass
  uint32_t high[MTiles][kBlocks * 8], low[MTiles][kBlocks * 8];
  float unit[MTiles][2];  // of products of x, for the lane's columns of sums
  int first_block;        // of the pass

  static __device__ __forceinline__ int row(int half) { return Rows::row(half); }
  static __device__ __forceinline__ int row_at(int fragment_row) {
    return Rows::row_at(fragment_row);
  }

  __device__ __forceinline__ void load_x(const MatmulArgs &matmul, int k_tile, int pass) {
    const FragmentLane lane;
    first_block = pass * kBlocks;
    const int column = k_tile * kWarpTileK + first_block * kScaleK + lane.thread_in_group * 16;
#pragma unroll
    for (int m_tile = 0; m_tile < MTiles; ++m_tile) {
      const int m = m_tile * 8 + lane.group_id;
      const float *from = static_cast<const float *>(matmul.x) + m * matmul.x_stride + column;
      float4 x[kBlocks * 4];
      float largest = 0;
#pragma unroll
      for (int i = 0; i < kBlocks * 4; ++i) {
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
      for (int i = 0; i < kBlocks * 4; ++i) {
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
    for (int i = 0; i < kBlocks; ++i) {
      const int block = first_block + i;
      float d[MTiles][4] = {}, cross[MTiles][4] = {};
      const int chunk = block * 2 + lane.thread_in_group / 2, half = lane.thread_in_group % 2;
      const uint2 w = tile.half_chunk(row(0), chunk, half);
      const uint2 w8 = tile.half_chunk(row(1), chunk, half);
      mma_pairs<0>(lut, w.x, w8.x, i * 8, d, cross);
      mma_pairs<2>(lut, w.x, w8.x, i * 8 + 2, d, cross);
      mma_pairs<0>(lut, w.y, w8.y, i * 8 + 4, d, cross);
      mma_pairs<2>(lut, w.y, w8.y, i * 8 + 6, d, cross);
      const float scale = __shfl_sync(0xffffffffu, scales.x, block, 4);
      const float scale8 = __shfl_sync(0xffffffffu, scales.y, block, 4);
#pragma unroll
      for (int m = 0; m < MTiles; ++m)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          sums[m][k] = __fmaf_rn(k < 2 ? scale : scale8,
                                 multiply_rn(d[m][k] + cross[m][k], unit[m][k % 2]), sums[m][k]);
    }
    store_sums(lane, sums, accumulate, partial);
  }

 private:
  // D += columns of bytes Byte and Byte + 1 of words of two rows.
  template <int Byte>
  __device__ __forceinline__ void mma_pairs(SplitLut lut, uint32_t word, uint32_t word8, int first,
                                            float (&d)[MTiles][4],
                                            float (&cross)[MTiles][4]) const {
    const uint2 pairs[4] = {lut.pair<Byte>(word), lut.pair<Byte>(word8), lut.pair<Byte + 1>(word),
                            lut.pair<Byte + 1>(word8)};
    const uint32_t a[4] = {pairs[0].x, pairs[1].x, pairs[2].x, pairs[3].x};
    const uint32_t a_low[4] = {pairs[0].y, pairs[1].y, pairs[2].y, pairs[3].y};
#pragma unroll
    for (int m = 0; m < MTiles; ++m) {
      mma_m16n8k16(__half{}, cross[m], a_low, high[m][first], high[m][first + 1]);
      mma_m16n8k16(__half{}, d[m], a, high[m][first], high[m][first + 1]);
      mma_m16n8k16(__half{}, cross[m], a, low[m][first], low[m][first + 1]);
    }
  }
};

}  // namespace
}  // namespace nf4::cuda
