// A warp's product of a K-tile of W^T, 64 columns of the weight by 64 of its rows, with its part of
// dY.
//
// Codes, [n][k / 2] bytes, lie along the outputs, so that mma's pairs of the reduction are two rows
// of the weight. The nibbles of two rows make a byte, whose LUT entries are the pair: half an
// instruction per look-up more than in the forward kernels.
#pragma once

#include <cuda_fp16.h>

#include "cuda/element.cuh"
#include "cuda/matmul/skinny/strip_layout.cuh"
#include "cuda/matmul_grad/skinny_args.hpp"
#include "cuda/weight/byte_lut.cuh"
#include "cuda/weight/split_lut.cuh"

namespace nf4::cuda {
namespace {

constexpr int kGradSteps = kStripK / 16;

__device__ __forceinline__ float2 unpack_pair(__nv_bfloat16, uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ __forceinline__ float2 unpack_pair(__half, uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2 *>(&pair));
}

// The place of the scale of a row of a K-tile: the four scales of a lane in a step are side by
// side.
__device__ __forceinline__ int grad_scale_index(int row) {
  return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}

// B operands: dY times the scales of the warp's columns, in fp16. Scales vary along the reduction,
// so they cannot multiply sums. Each row of dY has a power of two over which fp16 holds the
// products of the K-tile; bits below 2^-38 of the largest are lost.
template <class T>
struct ScaledRows {
  uint32_t b[kGradSteps][2];
  float2 units;  // for the lane's columns of D, over SplitUnit::kToOne

  // `x` is where the lane reads eight rows of dY in a stage; `scales` are the lane's of the K-tile.
  __device__ __forceinline__ ScaledRows(const uint8_t *x,
                                        const uint32_t (&x_offsets)[kGradSteps * 2],
                                        const float4 (&scales)[kGradSteps]) {
    float2 products[kGradSteps][2];
    float largest = 0;
#pragma unroll
    for (int step = 0; step < kGradSteps; ++step)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 v =
            unpack_pair(T{}, *reinterpret_cast<const uint32_t *>(x + x_offsets[step * 2 + j]));
        const float4 s = scales[step];
        products[step][j] = {v.x * (j == 0 ? s.x : s.z), v.y * (j == 0 ? s.y : s.w)};
        largest = fmaxf(largest, fmaxf(fabsf(products[step][j].x), fabsf(products[step][j].y)));
      }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    const SplitUnit split(largest);
#pragma unroll
    for (int step = 0; step < kGradSteps; ++step)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        b[step][j] = pack_pair(__half{}, products[step][j].x * split.scale,
                               products[step][j].y * split.scale);
    const int column = FragmentLane().thread_in_group * 2;
    units = {__shfl_sync(0xffffffffu, split.unit, column * 4),
             __shfl_sync(0xffffffffu, split.unit, column * 4 + 4)};
  }
};

// Takes the nibbles of 0xf0f0f0f0 from a, and the others from b.
__device__ __forceinline__ uint32_t merge_nibbles(uint32_t a, uint32_t b) {
  uint32_t merged;
  asm("lop3.b32 %0, %1, %2, 0xf0f0f0f0, 0xe4;" : "=r"(merged) : "r"(a), "r"(b));
  return merged;
}

// A lane has 8 neighbouring outputs of a row's word: fragment rows g and g + 8 of the i-th row tile
// are outputs 2i and 2i + 1 of them.
template <class T, int MTiles>
class GradMainloop {
  using Layout = StripAwq<kGradWarpsN>;

 public:
  __device__ __forceinline__ GradMainloop(const uint8_t *lut, int n_warp)
      : lane_(n_warp), lut_(lut, threadIdx.x % 32 * ByteLut::kLaneBytes) {
#pragma unroll
    for (int i = 0; i < kGradSteps * 2; ++i)
      x_offsets_[i] = keep_in_register<MTiles == 1>(lane_.x ^ i * 16);
  }

  // Adds to sums, which are over SplitUnit::kToOne. `scales` are the warp's of the K-tile.
  __device__ __forceinline__ void add(const uint8_t *weights, const uint8_t *x, const float *scales,
                                      float (&sums)[kRowTiles][MTiles][4]) const {
    float4 lane_scales[kGradSteps];
#pragma unroll
    for (int step = 0; step < kGradSteps; ++step)
      lane_scales[step] = *reinterpret_cast<const float4 *>(scales + step * 16 +
                                                            FragmentLane().thread_in_group * 4);
    uint32_t b[MTiles][kGradSteps][2];
    float2 units[MTiles];
#pragma unroll
    for (int m = 0; m < MTiles; ++m) {
      const ScaledRows<T> products(x + m * 8 * kXRowBytes, x_offsets_, lane_scales);
      units[m] = products.units;
#pragma unroll
      for (int i = 0; i < kGradSteps * 2; ++i) b[m][i / 2][i % 2] = products.b[i / 2][i % 2];
    }
    float d[kRowTiles][MTiles][4] = {};
#pragma unroll
    for (int step = 0; step < kGradSteps; ++step) {
      const auto word = [&](uint32_t offset, int rows) {
        return *reinterpret_cast<const uint32_t *>(weights + offset +
                                                   (step * 16 + rows) * Layout::kRowBytes);
      };
      const uint32_t w0 = word(lane_.first, 0), w1 = word(lane_.second, 0);
      const uint32_t w8 = word(lane_.first, 8), w9 = word(lane_.second, 8);
      const uint32_t codes[4] = {merge_nibbles(w0, w1 >> 4), merge_nibbles(w0 << 4, w1),
                                 merge_nibbles(w8, w9 >> 4), merge_nibbles(w8 << 4, w9)};
      add_row_tile<0>(codes, step, b, d);
      add_row_tile<1>(codes, step, b, d);
      add_row_tile<2>(codes, step, b, d);
      add_row_tile<3>(codes, step, b, d);
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int m = 0; m < MTiles; ++m)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          sums[i][m][k] = __fmaf_rn(d[i][m][k], k % 2 ? units[m].y : units[m].x, sums[i][m][k]);
  }

 private:
  template <int Index>
  __device__ __forceinline__ void add_row_tile(const uint32_t (&codes)[4], int step,
                                               const uint32_t (&b)[MTiles][kGradSteps][2],
                                               float (&d)[kRowTiles][MTiles][4]) const {
    const uint32_t a[4] = {lut_.pair<Index>(codes[0]), lut_.pair<Index>(codes[1]),
                           lut_.pair<Index>(codes[2]), lut_.pair<Index>(codes[3])};
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
      mma_m16n8k16(__half{}, d[Index][m], a, b[m][step][0], b[m][step][1]);
  }

  typename Layout::Lane lane_;
  uint32_t x_offsets_[kGradSteps * 2];  // offsets of dY in a stage
  ByteLut lut_;
};

}  // namespace
}  // namespace nf4::cuda
