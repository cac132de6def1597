// Layouts: where the codes of a K-tile lie in shared memory, and which of them a lane of a wgmma
// consumer multiplies. Those of integer weights are in int4_layout.cuh.
#pragma once

#include <cstdint>

#include "cuda/ptx/tma.cuh"

namespace nf4::cuda {

// NF4 and FP4: [n][k / 2] bytes. A K-tile is rows of 64 bytes in the 64-byte swizzle, a step of it
// 32 of them. Of each word of a row a lane uses byte lane % 4, which is the order in which wgmma
// wants A if x has its columns in memory order.
struct RowPacked {
  static constexpr int kRowBytes = 64;
  // Of a lane's two rows, where the second lies from the first.
  static constexpr int kRowDistance = 8;
  // Whether two warps have 32 rows between them, each some of every 8.
  static constexpr bool kWarpPairs = false;

  // A K-tile of a CTA tile whose first row of the weight is n: the box of the weight's tensor map.
  static __device__ __forceinline__ void load_tile(uint8_t *stage, const void *map, int k_tile,
                                                   int n, uint64_t *barrier) {
    tma_load_2d(stage, map, k_tile * kRowBytes, n, barrier);
  }
  static __device__ __forceinline__ void prefetch_tile(const void *map, int k_tile, int n) {
    tma_prefetch_2d(map, k_tile * kRowBytes, n);
  }

  // The words of a step that a quad reads: rows g and g + 8 of a warp's 16.
  struct Words {
    uint4 words[2][2];  // [row][chunk]
  };

  // Of a lane's row g in a K-tile, its first chunk; those of others differ in one bit or two.
  static __device__ __forceinline__ int lane_offset(int row) {
    return row * kRowBytes + row / 2 % 4 * 16;
  }

  // Of a lane, its first row from the first of the 16 that its warp stores, and in the tile.
  static __device__ __forceinline__ int lane_row(int lane) { return lane / 4; }
  static __device__ __forceinline__ int row_of(int lane_offset) { return lane_offset / kRowBytes; }

  template <int Step>
  static __device__ __forceinline__ void load(Words &to, const uint8_t *stage, int lane_offset) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk)
        to.words[half][chunk] = *reinterpret_cast<const uint4 *>(
            stage + (lane_offset ^ (Step * 2 + chunk) * 16) + half * 8 * kRowBytes);
  }

  // The A operands of a step's four wgmmas, of weights that decode(word, half) makes from this
  // lane's byte of a word of row g + 8 * half.
  template <class Decode>
  static __device__ __forceinline__ void decode(uint32_t (&a)[4][4], const Words &from,
                                                Decode decode) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        const uint4 words = from.words[half][chunk];
        a[chunk * 2][half] = decode(words.x, half);
        a[chunk * 2][half + 2] = decode(words.y, half);
        a[chunk * 2 + 1][half] = decode(words.z, half);
        a[chunk * 2 + 1][half + 2] = decode(words.w, half);
      }
  }
};

}  // namespace nf4::cuda
