// The layouts of integer weights, like RowPacked in layout.cuh: where the codes of a K-tile lie in
// shared memory, and which of them a lane of a wgmma consumer multiplies.
#pragma once

#include <cstdint>

#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/weight/layout.cuh"
#include "nf4/nf4.h"

namespace nf4::cuda {

// compressed-tensors: [n][k / 8] words, the bytes of RowPacked with the low nibble first.
template <int TileN>
struct RowPackedLayout : RowPacked {
  static constexpr nf4_int4_layout kLayout = NF4_INT4_COMPRESSED_TENSORS;
  static constexpr bool kScalesByGroup = false;  // [n][group]
  // The shift of the zero of row i among a few neighbours in a word, relative to the first.
  static __device__ __forceinline__ int zero_shift(int i) { return i * 4; }
};

// GPTQ: [k / 8][n] words. A K-tile is 16 rows of TileN words. The rows of a quad are 2g and 2g + 1,
// so that one load has the words of both and no two lanes of a load share a bank. A lane uses byte
// lane % 4 of each word, as in RowPacked.
template <int TileN>
struct GptqLayout {
  static constexpr nf4_int4_layout kLayout = NF4_INT4_GPTQ;
  static constexpr bool kScalesByGroup = true;  // [group][n]
  static __device__ __forceinline__ int zero_shift(int i) { return i * 4; }
  static constexpr int kWordRows = 16;
  static constexpr int kRowDistance = 1;
  static constexpr bool kWarpPairs = false;

  static __device__ __forceinline__ void load_tile(uint8_t *stage, const void *map, int k_tile,
                                                   int n, uint64_t *barrier) {
    load_columns(stage, map, k_tile * kWordRows * 8, n, barrier);
  }
  // Loads the words from a column on that begins a word.
  static __device__ __forceinline__ void load_columns(uint8_t *stage, const void *map, int column,
                                                      int n, uint64_t *barrier) {
    tma_load_2d(stage, map, n, column / 8, barrier);
  }
  static __device__ __forceinline__ void prefetch_tile(const void *map, int k_tile, int n) {
    tma_prefetch_2d(map, n, k_tile * kWordRows);
  }

  // The words of a step that a quad reads, by rows of words, for rows 2g and 2g + 1.
  struct Words {
    uint2 words[kWordRows / 2];
  };

  static __device__ __forceinline__ int lane_row(int lane) { return lane / 4 * 2; }
  static __device__ __forceinline__ int lane_offset(int row) { return row * 4; }
  static __device__ __forceinline__ int row_of(int lane_offset) { return lane_offset / 4; }

  template <int Step>
  static __device__ __forceinline__ void load(Words &to, const uint8_t *stage, int lane_offset) {
#pragma unroll
    for (int row = 0; row < kWordRows / 2; ++row)
      to.words[row] = *reinterpret_cast<const uint2 *>(stage + lane_offset +
                                                       (Step * (kWordRows / 2) + row) * TileN * 4);
  }

  template <class Decode>
  static __device__ __forceinline__ void decode(uint32_t (&a)[4][4], const Words &from,
                                                Decode decode) {
#pragma unroll
    for (int row = 0; row < kWordRows / 2; ++row) {
      a[row / 2][row % 2 * 2] = decode(from.words[row].x, 0);
      a[row / 2][row % 2 * 2 + 1] = decode(from.words[row].y, 1);
    }
  }
};

// AWQ: [k][n / 8] words. A K-tile is 128 rows of TileN / 2 bytes, in the swizzle of that width. A
// transposing ldmatrix reads 16 bytes of eight rows, which are 8 columns of 32 weight rows. It
// gives a lane half a word of columns 2t and 2t + 1, side by side: nibbles of four rows, two for
// its warp and two for the neighbouring warp.
template <int TileN>
struct AwqLayout {
  static constexpr nf4_int4_layout kLayout = NF4_INT4_AWQ;
  static constexpr bool kScalesByGroup = true;
  static __device__ __forceinline__ int zero_shift(int i) { return i % 2 * 16 + i / 2 * 4; }
  static constexpr int kTileCols = 128;
  static constexpr int kRowBytes = TileN / 2;  // per column of the weight
  static constexpr int kRowDistance = 2;
  static constexpr bool kWarpPairs = true;
  static_assert(kRowBytes == 64 || kRowBytes == 128);

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

  // Half g of the eight halves of words of 32 rows has rows 8 (g / 2) + g % 2 and those 2, 4 and 6
  // after it. The rows of an odd warp lie 4 after its neighbour's, but the rows that it stores 16
  // after.
  static __device__ __forceinline__ int lane_row(int lane) {
    return lane / 8 * 8 + lane / 4 % 2 - static_cast<int>(threadIdx.x / 32 % 2) * 12;
  }
  // The offset of the 16 bytes whose address this lane gives, those of column `lane`.
  static __device__ __forceinline__ int lane_offset(int row) {
    const int column = static_cast<int>(threadIdx.x % 32);
    const int swizzle = kRowBytes == 64 ? column / 2 % 4 : column % 8;
    return column * kRowBytes + (row / 32 ^ swizzle) * 16;
  }
  static __device__ __forceinline__ int row_of(int) {
    return (static_cast<int>(threadIdx.x) - 128) / 32 * 16 +
           lane_row(static_cast<int>(threadIdx.x % 32));
  }

  template <int Step>
  static __device__ __forceinline__ void load(Words &to, const uint8_t *stage, int lane_offset) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      ldmatrix_x4_trans(to.words[i], stage + lane_offset + (Step * 2 + i) * 32 * kRowBytes);
  }

  template <class Decode>
  static __device__ __forceinline__ void decode(uint32_t (&a)[4][4], const Words &from,
                                                Decode decode) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        a[i / 2][i % 2 * 2 + half] = decode(from.words[i / 4][i % 4], half);
  }
};

template <nf4_int4_layout Layout, int TileN>
struct Int4LayoutOf;
template <int TileN>
struct Int4LayoutOf<NF4_INT4_GPTQ, TileN> {
  using Type = GptqLayout<TileN>;
};
template <int TileN>
struct Int4LayoutOf<NF4_INT4_AWQ, TileN> {
  using Type = AwqLayout<TileN>;
};
template <int TileN>
struct Int4LayoutOf<NF4_INT4_COMPRESSED_TENSORS, TileN> {
  using Type = RowPackedLayout<TileN>;
};

}  // namespace nf4::cuda
