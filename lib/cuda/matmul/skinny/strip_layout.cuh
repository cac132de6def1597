// The layouts of integer weights for the strip kernels: those whose neighbouring words are
// neighbours along N. A lane of group g has rows 8g to 8g + 7 of its warp's 64: fragment rows g and
// g + 8 of the i-th of four row tiles are rows 8g + 2i and 8g + 2i + 1.
#pragma once

#include "cuda/matmul/skinny/int4_mainloop.cuh"
#include "cuda/matmul/skinny/strip_args.hpp"
#include "cuda/matmul/skinny/strip_pipeline.cuh"
#include "cuda/matmul/skinny/strip_reduce.cuh"

namespace nf4::cuda {
namespace {

// The fp32 sums of a warp: 64 rows of the weight by MTiles tiles of 8 rows of x, and sums of x
// alone.
template <int MTiles>
struct StripSums {
  float d[kRowTiles][MTiles][4];
  float x[MTiles][4];

  __device__ __forceinline__ StripSums() : d{}, x{} {}
};

template <class T, int MTiles>
__device__ __forceinline__ void mma_ones(StripSums<MTiles> &sums, int m_tile, uint32_t b0,
                                         uint32_t b1) {
  constexpr uint32_t kOne = Int4Pairs<T>::kOne;
  constexpr uint32_t kOnes[4] = {kOne, kOne, kOne, kOne};
  mma_m16n8k16(T{}, sums.x[m_tile], kOnes, b0, b1);
}

// Codes [k][n / 8]: a K-tile is kStripK rows of 64 or 128 bytes in the swizzle of that width.
template <int kWarpsN_>
struct StripAwq {
  static constexpr int kWarpsN = kWarpsN_;
  static constexpr int kRowBytes = kStripRows<kWarpsN> / 2;
  static constexpr int kBoxes = 1;
  static __device__ __forceinline__ void load_box(uint8_t *to, const void *map, int k_tile, int n,
                                                  int, uint64_t *barrier) {
    tma_load_2d(to, map, n / 2, k_tile * kStripK, barrier);
  }
  static __device__ __forceinline__ void prefetch_box(const void *map, int k_tile, int n, int) {
    tma_prefetch_2d(map, n / 2, k_tile * kStripK);
  }

  // The places where a lane reads: offsets of rows 2t and 2t + 1 of a stage, and in x. With rows of
  // 64 bytes, odd lanes of a quad read them in reverse order, from other banks.
  struct Lane {
    uint32_t first, second, x;
    uint32_t low, high;  // the selectors of __byte_perm for the halves of two words

    __device__ __forceinline__ explicit Lane(int n_warp) {
      const FragmentLane lane;
      const int g = lane.group_id, t = lane.thread_in_group;
      const int swap = kRowBytes == 64 ? t % 2 : 0;
      const auto offset = [&](int row) {
        const int chunk = (n_warp * 2 + g / 4) ^ (kRowBytes == 64 ? row / 2 % 4 : row % 8);
        return keep_in_register<true>(row * kRowBytes + chunk * 16 + g % 4 * 4);
      };
      first = offset(t * 2 + swap);
      second = offset(t * 2 + 1 - swap);
      x = keep_in_register<true>(g * kXRowBytes + g * 16 + t * 4);
      low = keep_in_register<true>(swap ? 0x1054 : 0x5410);
      high = keep_in_register<true>(swap ? 0x3276 : 0x7632);
    }
  };

  template <class T, int MTiles>
  static __device__ __forceinline__ void add(const Lane &lane, const uint8_t *weights,
                                             const uint8_t *x, StripSums<MTiles> &sums) {
#pragma unroll
    for (int step = 0; step < kStripK / 16; ++step) {
      const auto word = [&](uint32_t offset, int rows) {
        return *reinterpret_cast<const uint32_t *>(weights + offset +
                                                   (step * 16 + rows) * kRowBytes);
      };
      const uint32_t w0 = word(lane.first, 0), w1 = word(lane.second, 0);
      const uint32_t w8 = word(lane.first, 8), w9 = word(lane.second, 8);
      const uint32_t pairs[4] = {__byte_perm(w0, w1, lane.low), __byte_perm(w0, w1, lane.high),
                                 __byte_perm(w8, w9, lane.low), __byte_perm(w8, w9, lane.high)};
      uint32_t b[MTiles][2];
#pragma unroll
      for (int m = 0; m < MTiles; ++m) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
          b[m][j] = *reinterpret_cast<const uint32_t *>(x + m * 8 * kXRowBytes +
                                                        (lane.x ^ (step * 2 + j) * 16));
        mma_ones<T>(sums, m, b[m][0], b[m][1]);
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        uint32_t a[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = Int4Pairs<T>::at(pairs[j], i);
#pragma unroll
        for (int m = 0; m < MTiles; ++m) mma_m16n8k16(T{}, sums.d[i][m], a, b[m][0], b[m][1]);
      }
    }
  }

  // The stored zero points of rows 2i and 2i + 1 of a word.
  static __device__ __forceinline__ uint32_t zeros(uint32_t word, int i) { return word >> i * 4; }
};

// Codes [k / 8][n]: a K-tile is kBoxes boxes of 8 rows of 128 bytes in the 128-byte swizzle, 32
// rows of the weight each.
template <int kWarpsN_>
struct StripGptq {
  static constexpr int kWarpsN = kWarpsN_;
  static constexpr int kBoxes = kStripRows<kWarpsN> / 32;
  static __device__ __forceinline__ void load_box(uint8_t *to, const void *map, int k_tile, int n,
                                                  int box, uint64_t *barrier) {
    tma_load_2d(to + box * 1024, map, n * 4 + box * 128, k_tile * (kStripK / 8), barrier);
  }
  static __device__ __forceinline__ void prefetch_box(const void *map, int k_tile, int n, int box) {
    tma_prefetch_2d(map, n * 4 + box * 128, k_tile * (kStripK / 8));
  }

  // The place where a lane reads its first octet of columns, such that the lanes of a quad read
  // from different banks; the second octet is two further.
  struct Lane {
    uint32_t first[2], x[2];

    __device__ __forceinline__ explicit Lane(int n_warp) {
      const FragmentLane lane;
      const int g = lane.group_id, t = lane.thread_in_group;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int octet = t % 2 + t / 2 * 4 + j * 2;
        first[j] = keep_in_register<true>((n_warp * 2 + g / 4) * 1024 + octet * 128 +
                                          (g % 4 * 2 ^ octet) * 16);
        x[j] = keep_in_register<true>(g * kXRowBytes + (octet ^ g) * 16);
      }
    }
  };

  template <class T, int MTiles>
  static __device__ __forceinline__ void add(const Lane &lane, const uint8_t *weights,
                                             const uint8_t *x, StripSums<MTiles> &sums) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t w[8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 v = *reinterpret_cast<const uint4 *>(weights + (lane.first[j] ^ half * 16));
        w[half * 4] = v.x, w[half * 4 + 1] = v.y, w[half * 4 + 2] = v.z, w[half * 4 + 3] = v.w;
      }
      uint32_t b[MTiles][4];
#pragma unroll
      for (int m = 0; m < MTiles; ++m) {
        load_octet(reinterpret_cast<const T *>(x + m * 8 * kXRowBytes + lane.x[j]), b[m]);
        order_octet(true, b[m], b[m]);
#pragma unroll
        for (int u = 0; u < 2; ++u) mma_ones<T>(sums, m, b[m][u * 2], b[m][u * 2 + 1]);
      }
#pragma unroll
      for (int u = 0; u < 2; ++u)
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          const uint32_t a[4] = {
              Int4Pairs<T>::at(w[i * 2], u * 2), Int4Pairs<T>::at(w[i * 2 + 1], u * 2),
              Int4Pairs<T>::at(w[i * 2], u * 2 + 1), Int4Pairs<T>::at(w[i * 2 + 1], u * 2 + 1)};
#pragma unroll
          for (int m = 0; m < MTiles; ++m)
            mma_m16n8k16(T{}, sums.d[i][m], a, b[m][u * 2], b[m][u * 2 + 1]);
        }
    }
  }

  static __device__ __forceinline__ uint32_t zeros(uint32_t word, int i) {
    return (word >> i * 8 & 0xffu) * 0x1001u;
  }
};

}  // namespace
}  // namespace nf4::cuda
