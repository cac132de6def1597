// Layouts: where the codes of a K-tile lie in shared memory, and which of them a lane of a wgmma
// consumer multiplies. The layouts of integer weights are in int4_layout.cuh.
#pragma once

#include <cstdint>

#include "cuda/ptx/tma.cuh"

namespace nf4::cuda {

// NF4 and FP4: [n][k / 2] bytes. A K-tile has rows of 64 bytes in the 64-byte swizzle; a step of it
// has 32 bytes of each row. A lane uses byte lane % 4 of each word of a row. This is the order in
// which wgmma takes A if x has its columns in memory order.
struct RowPacked {
  static constexpr int kRowBytes = 64;
  // The distance between a lane's two rows.
  static constexpr int kRowDistance = 8;
  // Whether two warps share 32 rows, each with some of every 8.
  static constexpr bool kWarpPairs = false;

  // Loads a K-tile of a CTA tile whose first row of the weight is n: the box of the weight's tensor
  // map.
  static __device__ __forceinline__ void load_tile(uint8_t *stage, const void *map, int k_tile,
                                                   int n, uint64_t *barrier) {
    tma_load_2d(stage, map, k_tile * kRowBytes, n, barrier);
  }
  static __device__ __forceinline__ void prefetch_tile(const void *map, int k_tile, int n) {
    tma_prefetch_2d(map, k_tile * kRowBytes, n);
  }

  // The words of a step that a quad reads: rows g and g + 8 of the 16 rows of a warp.
  struct Words {
    uint4 words[2][2];  // [row][chunk]
  };

  // The offset of the first chunk of a lane's row g in a K-tile. The offsets of other chunks differ
  // in one bit or two.
  static __device__ __forceinline__ int lane_offset(int row) {
    return row * kRowBytes + row / 2 % 4 * 16;
  }

  // lane_row is a lane's first row, relative to the 16 rows that its warp stores; row_of is its row
  // in the tile.
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

  // The A operands of a step's four wgmmas. decode(word, half) makes their weights from this lane's
  // byte of a word of row g + 8 * half.
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
