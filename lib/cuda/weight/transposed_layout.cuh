// The layout of W^T for the wgmma kernels, like RowPacked in layout.cuh, and the decoding of its
// codes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/weight/decode.cuh"

namespace nf4::cuda {
namespace {

// NF4 and FP4 are stored as [n][k / 2] bytes; rows of W^T run along k, its columns along n. A
// K-tile is 128 stored rows of TileN / 2 bytes, in the swizzle of that width. A transposing
// ldmatrix reads 16 bytes of eight stored rows, which are 8 columns of 32 rows of W^T. It gives a
// lane two bytes of columns 2t and 2t + 1, side by side: four rows, two for its warp and two for
// the neighbouring warp.
template <int TileN>
struct TransposedLayout {
  static constexpr int kTileCols = 128;
  static constexpr int kRowBytes = TileN / 2;  // per column of W^T
  static constexpr int kRowDistance = 1;
  static constexpr bool kWarpPairs = true;
  static_assert(kRowBytes == 64);

  static __device__ __forceinline__ void load_tile(uint8_t *stage, const void *map, int k_tile,
                                                   int n, uint64_t *barrier) {
    load_columns(stage, map, k_tile * kTileCols, n, barrier);
  }
  static __device__ __forceinline__ void load_columns(uint8_t *stage, const void *map, int column,
                                                      int n, uint64_t *barrier) {
    tma_load_2d(stage, map, n / 2, column, barrier);
  }
  static __device__ __forceinline__ void prefetch_tile(const void *map, int k_tile, int n) {
    tma_prefetch_2d(map, n / 2, k_tile * kTileCols);
  }

  // The words of a step, by 8 columns.
  struct Words {
    uint32_t words[2][4];
  };

  static __device__ __forceinline__ int odd_warp() {
    return static_cast<int>(threadIdx.x / 32 % 2);
  }
  // The rows are 4g and 4g + 1 of a pair of warps; an odd warp has those 2 further on.
  static __device__ __forceinline__ int lane_row(int lane) {
    return lane / 4 * 4 + odd_warp() * (2 - 16);
  }
  // The offset of the 16 bytes whose address this lane gives, those of column `lane`.
  static __device__ __forceinline__ int lane_offset(int row) {
    const int column = static_cast<int>(threadIdx.x % 32);
    return column * kRowBytes + (row / 32 ^ column / 2 % 4) * 16;
  }

  template <int Step>
  static __device__ __forceinline__ void load(Words &to, const uint8_t *stage, int lane_offset) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      ldmatrix_x4_trans(to.words[i], stage + lane_offset + (Step * 2 + i) * 32 * kRowBytes);
  }

  // The A operands of a step's four wgmmas. decode(word, i) makes those of this lane's two rows
  // from its bytes of columns 8i + 2t and 8i + 2t + 1.
  template <class Decode>
  static __device__ __forceinline__ void decode(uint32_t (&a)[4][4], const Words &from,
                                                Decode decode) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint2 rows = decode(from.words[i / 4][i % 4], i);
      a[i / 2][i % 2 * 2] = rows.x;
      a[i / 2][i % 2 * 2 + 1] = rows.y;
    }
  }
};

// Weights in T, rounded like those of LutScaledBf16 and LutScaledFp16, with a look-up for each
// stored byte, which has a column of both rows. In bf16 there are also scales in fp16, whose
// products with entries are first rounded to fp16; the norm of the errors is then 1.02 times as
// large.
template <class T>
class TransposedDecode {
  static constexpr bool kFp16 = std::is_same_v<T, __half>;
  using Scaled = std::conditional_t<kFp16, LutScaledFp16, LutScaledBf16>;
  using Layout = TransposedLayout<128>;

 public:
  using Element = T;
  static constexpr bool kFp16Scales = !kFp16;

  template <int Threads>
  static __device__ __forceinline__ float build(const LutCodebook &own, const float *codebook,
                                                uint8_t *lut, int thread) {
    return Scaled::template build<Threads>(own, codebook, lut, thread);
  }

  __device__ __forceinline__ explicit TransposedDecode(const uint8_t *lut)
      : first_(lut, Layout::odd_warp()), second_(lut, Layout::odd_warp() + 2) {}

  // Returns both rows of columns 2t and 2t + 1, which have these scales.
  __device__ __forceinline__ uint2 operator()(uint32_t word, float2 scales) const {
    const float2 first = entries(first_.address(word)), second = entries(second_.address(word));
    return {pack_pair(T{}, scaled(first.x, scales.x), scaled(second.x, scales.y)),
            pack_pair(T{}, scaled(first.y, scales.x), scaled(second.y, scales.y))};
  }
  __device__ __forceinline__ uint2 operator()(uint32_t word, uint32_t scales) const {
    const __half2 of = *reinterpret_cast<const __half2 *>(&scales);
    const auto pair = [](const uint8_t *at) { return *reinterpret_cast<const __half2 *>(at); };
    const float2 first = __half22float2(__hmul2(pair(first_.address(word)), __low2half2(of)));
    const float2 second = __half22float2(__hmul2(pair(second_.address(word)), __high2half2(of)));
    return {pack_pair(T{}, first.x, second.x), pack_pair(T{}, first.y, second.y)};
  }

 private:
  static __device__ __forceinline__ float2 entries(const uint8_t *at) {
    if constexpr (kFp16)
      return LutScaledFp16::around_one(*reinterpret_cast<const uint32_t *>(at));
    else
      return __half22float2(*reinterpret_cast<const __half2 *>(at));
  }
  static __device__ __forceinline__ float scaled(float entry, float scale) {
    return kFp16 ? LutScaledFp16::scaled(entry, scale) : multiply_rn(entry, scale);
  }

  const QuadLut first_, second_;
};

}  // namespace
}  // namespace nf4::cuda
