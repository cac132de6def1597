// The layouts of integer weights for the skinny kernels: how a warp tile comes to shared memory,
// which of its rows and octets of columns a lane multiplies, and where scales and zero points lie.
#pragma once

#include "core/int4.hpp"
#include "cuda/matmul/skinny/mainloop.cuh"
#include "cuda/matmul/skinny/pipeline.cuh"
#include "cuda/weight/int4_scale.cuh"

namespace nf4::cuda {
namespace {

// The scales and the zero points of two rows of the weight; the second row's zero point is in the
// high half.
struct Int4Scales {
  float scale, scale8;
  uint32_t zeros;
};

// Extracts two zero points from the low bits of each half.
__device__ __forceinline__ uint32_t zero_points(uint32_t halves) { return halves & 0x000f000fu; }

// compressed-tensors: codes [n][k / 8] words, scales [n][group], zero points [n / 8][group] words.
struct SkinnyRowPacked : RowCodes {
  // The row of a tile for a fragment row, if lanes have quarters of its columns or if they share
  // them. In the latter case even rows come before odd ones, to avoid bank conflicts.
  static __device__ __forceinline__ int row_of_quarters(int fragment_row) { return fragment_row; }
  static __device__ __forceinline__ int row_of_shared(int fragment_row) {
    return (fragment_row % 4 * 2 + fragment_row / 4 % 2) + fragment_row / 8 * 8;
  }

  // octet_of_quarter is the octet of 8 columns that is the `index`-th of the lane's quarter.
  // octet_of_shared is the lane's `index`-th of the eight octets of a quarter that four lanes
  // share.
  static __device__ __forceinline__ int octet_of_quarter(int index) { return index; }
  static __device__ __forceinline__ int octet_of_shared(int index) {
    return FragmentLane().thread_in_group * 2 + index;
  }

  // The words of octets 4 * half to 4 * half + 3 of the lane's quarter, for its two rows.
  struct QuarterReader {
    uint32_t lane_offset;
    __device__ __forceinline__ QuarterReader()
        : lane_offset(keep_in_register<true>(
              StageTile::offset(FragmentLane().group_id, FragmentLane().thread_in_group * 2))) {}
    __device__ __forceinline__ void read(const StageTile &tile, int half, uint32_t (&w)[4],
                                         uint32_t (&w8)[4]) const {
      // The number of the second chunk differs in its lowest bit.
      const uint4 v = tile.chunk(lane_offset ^ half * 16);
      const uint4 v8 = tile.chunk((lane_offset ^ half * 16) + 8 * (kWarpTileK / 2));
      w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
      w8[0] = v8.x, w8[1] = v8.y, w8[2] = v8.z, w8[3] = v8.w;
    }
  };

  // Reads the words of the lane's two octets of a quarter that four lanes share.
  static __device__ __forceinline__ void read_shared(const StageTile &tile, int quarter,
                                                     uint32_t (&w)[2], uint32_t (&w8)[2]) {
    const FragmentLane lane;
    const int chunk = quarter * 2 + lane.thread_in_group / 2, half = lane.thread_in_group % 2;
    const int row = row_of_shared(lane.group_id);
    const uint2 v = tile.half_chunk(row, chunk, half), v8 = tile.half_chunk(row + 8, chunk, half);
    w[0] = v.x, w[1] = v.y;
    w8[0] = v8.x, w8[1] = v8.y;
  }

  // Scales in shared memory are a copy: those of a CTA's rows lie side by side.
  struct ScaleReader {
    const uint16_t *scale;
    const uint32_t *zero;
    int groups, shift;
    __device__ __forceinline__ ScaleReader(const Int4SkinnyArgs &args, uint8_t *shared, int group,
                                           int tile, int row)
        : groups(static_cast<int>(args.matmul.weight.groups)), shift(row * 4) {
      scale = reinterpret_cast<const uint16_t *>(shared + args.smem_scales) +
              (tile * kWarpTileN + row) * groups + group;
      zero =
          reinterpret_cast<const uint32_t *>(shared + args.smem_zeros) + tile * 2 * groups + group;
    }
    __device__ __forceinline__ void advance(int tiles) {
      scale += tiles * kWarpTileN * groups;
      zero += tiles * 2 * groups;
    }
    __device__ __forceinline__ Int4Scales get(const Int4View &weight) const {
      const uint32_t first = int4_zero_word(*zero, weight.zero_offset) >> shift;
      const uint32_t second = int4_zero_word(zero[groups], weight.zero_offset) >> shift;
      return {scale_to_float(weight.fp16_scales, *scale),
              scale_to_float(weight.fp16_scales, scale[8 * groups]),
              zero_points(__byte_perm(first, second, 0x5410))};
    }
  };
};

// GPTQ: codes [k / 8][n] words, scales [group][n], zero points [group][n / 8] words. A warp tile
// is 32 rows of 64 bytes in the 64-byte swizzle, each 8 columns of 16 rows of the weight.
struct SkinnyGptq {
  static constexpr int kBoxBytes = kWarpTileN * 4;

  static __device__ __forceinline__ void load_tile(uint8_t *to, const void *map, int column, int n,
                                                   uint64_t *barrier) {
    tma_load_2d(to, map, n * 4, column / 8, barrier);
  }
  static __device__ __forceinline__ void prefetch_tile(const void *map, int column, int n) {
    tma_prefetch_2d(map, n * 4, column / 8);
  }
  static __device__ __forceinline__ TileChunk chunk(const Int4View &weight, int column,
                                                    int first_row, int index) {
    const int octet = index / 4;
    const int64_t k8 = column / 8 + octet, n = first_row + index % 4 * 4;
    const bool in_bounds = n < weight.rows && k8 < weight.cols / 8;
    return {offset(octet, index % 4), in_bounds ? (k8 * weight.rows + n) * 4 : 0, in_bounds};
  }
  static __device__ __forceinline__ uint32_t offset(int octet, int chunk) {
    return octet * kBoxBytes + (chunk ^ octet / 2 % 4) * 16;
  }

  // A lane reads the words of two rows at a time.
  static __device__ __forceinline__ int row_of_quarters(int fragment_row) {
    return fragment_row % 8 * 2 + fragment_row / 8;
  }
  static __device__ __forceinline__ int row_of_shared(int fragment_row) {
    return row_of_quarters(fragment_row);
  }

  // The four lanes of a group read from different banks: octets 0, 1, 4 and 5 of eight at a time.
  static __device__ __forceinline__ int first_octet() {
    const int lane = FragmentLane().thread_in_group;
    return lane % 2 + lane / 2 * 4;
  }
  static __device__ __forceinline__ int octet_of_quarter(int index) {
    return index ^ first_octet();
  }
  static __device__ __forceinline__ int octet_of_shared(int index) {
    return first_octet() + index * 2;
  }
  static __device__ __forceinline__ uint32_t lane_offset(int octet) {
    const int pair = FragmentLane().group_id;
    return offset(octet, pair / 2) + pair % 2 * 8;
  }

  struct QuarterReader {
    uint32_t first;
    __device__ __forceinline__ QuarterReader()
        : first(keep_in_register<true>(
              lane_offset(FragmentLane().thread_in_group * 8 + first_octet()))) {}
    __device__ __forceinline__ void read(const StageTile &tile, int half, uint32_t (&w)[4],
                                         uint32_t (&w8)[4]) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int octet = half * 4 + i;
        const uint2 v = tile.pair(first ^ (octet * kBoxBytes + octet / 2 * 16));
        w[i] = v.x, w8[i] = v.y;
      }
    }
  };

  static __device__ __forceinline__ void read_shared(const StageTile &tile, int quarter,
                                                     uint32_t (&w)[2], uint32_t (&w8)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 v = tile.pair(lane_offset(octet_of_shared(i)) + quarter * 8 * kBoxBytes);
      w[i] = v.x, w8[i] = v.y;
    }
  }

  // In shared memory scales are [group][scale_pitch], zero points [group][scale_pitch / 8] words.
  struct ScaleReader {
    const uint32_t *scale;
    const uint32_t *zero;
    __device__ __forceinline__ ScaleReader(const Int4SkinnyArgs &args, uint8_t *shared, int group,
                                           int tile, int row) {
      const int index = group * args.scale_pitch + tile * kWarpTileN + row;
      scale = reinterpret_cast<const uint32_t *>(shared + args.smem_scales) + index / 2;
      zero = reinterpret_cast<const uint32_t *>(shared + args.smem_zeros) + index / 8;
    }
    __device__ __forceinline__ void advance(int tiles) {
      scale += tiles * kWarpTileN / 2;
      zero += tiles * 2;
    }
    __device__ __forceinline__ Int4Scales get(const Int4View &weight) const {
      const uint32_t scales = *scale;
      const uint32_t zeros = int4_zero_word(*zero, weight.zero_offset);
      const uint32_t byte = zeros >> FragmentLane().group_id % 4 * 8 & 0xffu;
      return {scale_to_float(weight.fp16_scales, scales & 0xffffu),
              scale_to_float(weight.fp16_scales, scales >> 16), zero_points(byte * 0x1001u)};
    }
  };
};

}  // namespace
}  // namespace nf4::cuda
