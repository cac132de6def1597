// A warp's product of a warp tile of an integer weight with its part of x.
//
// A code q becomes a number c + q of T, two codes at a time. The sum of (c + q) x, minus (c + z)
// times the sum of x, is the group's sum of (q - z) x.
#pragma once

#include <type_traits>

#include "cuda/matmul/skinny/int4_layout.cuh"
#include "cuda/weight/int4_decode.cuh"

namespace nf4::cuda {
namespace {

// Codes as numbers c + q: 32 + q / 4 in bf16, 64 + q in fp16. Two of the four codes of a half word
// are made in place, in bits 0 to 3 and 4 to 7, and two from the word shifted by 8. One of each two
// is masked with the bits of c. For the other, the mask alone makes a number that is linear in q,
// which takes one more FMA and no ALU instruction.
template <class T>
struct Int4Pairs {
  static constexpr bool kHalf = std::is_same_v<T, __half>;
  static constexpr uint32_t kOne = kHalf ? 0x3c003c00u : 0x3f803f80u;
  static constexpr float kUnit = kHalf ? 1.0f : 4.0f;  // the unit of sums

  // Returns codes `index` and index + 4 of a word.
  static __device__ __forceinline__ uint32_t at(uint32_t word, int index) {
    const uint32_t moved = index < 2 ? word : word >> 8;
    if constexpr (kHalf) {
      if (index % 2 != 0) return masked<0x00f000f0u, 0x54005400u>(moved);
      const uint32_t number = masked<0x000f000fu, 0x64006400u>(moved);  // 1024 + q
      return fma(number, 0x3c003c00u, 0xe380e380u);                     // - 960
    }
    if (index % 2 == 0) return masked<0x000f000fu, 0x42004200u>(moved);
    return fma(moved & 0x00f000f0u, 0x7f007f00u, 0x42004200u);  // q * 2^-129 * 2^127 + 32
  }
  template <int Index>
  __device__ __forceinline__ uint32_t pair(uint32_t word) const {
    return at(word, Index);
  }

  // Minus (c + z), for the zero points in the low and the high half.
  static __device__ __forceinline__ float minus_low(uint32_t zeros) {
    return __uint_as_float(kHalf ? zeros << 17 | 0xc2800000u : zeros << 16 | 0xc2000000u);
  }
  static __device__ __forceinline__ float minus_high(uint32_t zeros) {
    return __uint_as_float(kHalf ? (zeros << 1 & 0x1e0000u) | 0xc2800000u
                                 : (zeros & 0xf0000u) | 0xc2000000u);
  }

 private:
  // This is one instruction; the compiler makes two of the constants.
  template <uint32_t Mask, uint32_t Magic>
  static __device__ __forceinline__ uint32_t masked(uint32_t word) {
    uint32_t numbers;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(numbers) : "r"(word), "r"(Mask), "r"(Magic));
    return numbers;
  }
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    return as_bits(__hfma2(as_pair<T>(a), as_pair<T>(b), as_pair<T>(c)));
  }
};

// Loads 8 elements of x. Elements out of bounds are loaded too, from the start of x, and masked
// when they are ordered: the compiler would wait for loads under a condition.
template <class T>
__device__ __forceinline__ void load_octet(const T *x, uint32_t *b) {
  const uint4 v = *reinterpret_cast<const uint4 *>(x);
  b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
}

// 8 elements of x, from memory order to B fragments of codes i and i + 4; or zeros.
__device__ __forceinline__ void order_octet(bool in_bounds, const uint32_t *from, uint32_t *b) {
  const uint32_t mask = in_bounds ? 0xffffffffu : 0;
  const uint32_t v[4] = {from[0] & mask, from[1] & mask, from[2] & mask, from[3] & mask};
  b[0] = __byte_perm(v[0], v[2], 0x5410);
  b[1] = __byte_perm(v[0], v[2], 0x7632);
  b[2] = __byte_perm(v[1], v[3], 0x5410);
  b[3] = __byte_perm(v[1], v[3], 0x7632);
}

// The sums of Octets octets of x, for the columns of B that this lane has in D: a product with
// ones.
template <class T, int Octets>
__device__ __forceinline__ float2 sum_octets(const uint32_t *x) {
  constexpr uint32_t kOne = Int4Pairs<T>::kOne;
  constexpr uint32_t kOnes[4] = {kOne, kOne, kOne, kOne};
  float d[2][4] = {};
#pragma unroll
  for (int i = 0; i < Octets; ++i) {
    mma_m16n8k16(T{}, d[0], kOnes, x[i * 4], x[i * 4 + 1]);
    mma_m16n8k16(T{}, d[1], kOnes, x[i * 4 + 2], x[i * 4 + 3]);
  }
  return {d[0][0] + d[1][0], d[0][1] + d[1][1]};
}

// Up to 2 rows of x; see WarpMmaM2.
template <class T, class Layout>
struct Int4MmaM2 {
  static constexpr int kMaxM = 2;
  static constexpr bool kLoadsAhead = true;  // there are registers for two K-tiles of x
  uint32_t x[1][32];
  uint32_t loaded[32];
  bool in_bounds;  // for `loaded`: the lane's column of B is a row of x, in the lane's own quarter
  float2 x_sum;
  typename Layout::QuarterReader reader;

  static __device__ __forceinline__ int row() {
    return Layout::row_of_quarters(FragmentLane().group_id);
  }
  static __device__ __forceinline__ int row_at(int fragment_row) {
    return Layout::row_of_quarters(fragment_row);
  }

  // X is as for WarpMmaM2::load_x.
  template <class X>
  __device__ __forceinline__ void load_x(const X &from, int k_tile) {
    const FragmentLane lane;
    const int column = k_tile * kWarpTileK + lane.thread_in_group * kScaleK;
    const XRow<T> row = x_row<T>(from, lane.group_id % 2);
    in_bounds = (lane.group_id / 2 == lane.thread_in_group) & row.exists & (column < x_cols(from));
    const T *const data = in_bounds ? row.data + column : x_start<T>(from);
#pragma unroll
    for (int i = 0; i < 8; ++i) load_octet(data + Layout::octet_of_quarter(i) * 8, loaded + i * 4);
  }

  // Called once the elements are needed.
  template <class X>
  __device__ __forceinline__ void prepare_x(const X &, int) {
#pragma unroll
    for (int i = 0; i < 8; ++i) order_octet(in_bounds, loaded + i * 4, x[0] + i * 4);
    x_sum = sum_octets<T, 8>(x[0]);
  }

  template <class FindScales>
  __device__ __forceinline__ void add(const StageTile &tile, FindScales find_scales,
                                      bool accumulate, float *partial) const {
    constexpr Int4Pairs<T> pairs;
    float d[2][1][4] = {};  // two chains of products, which wait less for each other
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t w[4], w8[4];
      reader.read(tile, half, w, w8);
#pragma unroll
      for (int i = 0; i < 4; ++i) mma_word<T>(pairs, w[i], w8[i], x, (half * 4 + i) * 4, d[i % 2]);
    }
    const Int4Scales found = find_scales();
    const float offset = pairs.minus_low(found.zeros), offset8 = pairs.minus_high(found.zeros);
    float sums[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      sums[k] = multiply_rn(
          k < 2 ? found.scale : found.scale8,
          multiply_rn(pairs.kUnit, __fmaf_rn(k < 2 ? offset : offset8, k % 2 ? x_sum.y : x_sum.x,
                                             d[0][0][k] + d[1][0][k])));
    store_quad_sums(sums, accumulate, partial);
  }
};

// Up to 8 or 16 rows of x; see WarpMmaM8.
template <class T, class Layout, int MTiles>
struct Int4MmaM8 {
  static constexpr int kMaxM = 8 * MTiles;
  static constexpr bool kLoadsAhead = false;
  uint32_t x[MTiles][32];
  bool exists[MTiles];  // whether the lane's column of B is a row of x
  float2 x_sum[MTiles][4];

  static __device__ __forceinline__ int row() {
    return Layout::row_of_shared(FragmentLane().group_id);
  }
  static __device__ __forceinline__ int row_at(int fragment_row) {
    return Layout::row_of_shared(fragment_row);
  }

  template <class X>
  __device__ __forceinline__ bool in_bounds(const X &from, int k_tile, int m_tile,
                                            int quarter) const {
    return exists[m_tile] & (k_tile * kWarpTileK + quarter * kScaleK < x_cols(from));
  }

  template <class X>
  __device__ __forceinline__ void load_x(const X &from, int k_tile) {
    const FragmentLane lane;
#pragma unroll
    for (int m_tile = 0; m_tile < MTiles; ++m_tile) {
      const XRow<T> row = x_row<T>(from, m_tile * 8 + lane.group_id);
      exists[m_tile] = row.exists;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int column =
            k_tile * kWarpTileK + i / 2 * kScaleK + Layout::octet_of_shared(i % 2) * 8;
        load_octet(in_bounds(from, k_tile, m_tile, i / 2) ? row.data + column : x_start<T>(from),
                   x[m_tile] + i * 4);
      }
    }
  }

  template <class X>
  __device__ __forceinline__ void prepare_x(const X &from, int k_tile) {
#pragma unroll
    for (int m_tile = 0; m_tile < MTiles; ++m_tile) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        order_octet(in_bounds(from, k_tile, m_tile, i / 2), x[m_tile] + i * 4, x[m_tile] + i * 4);
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter)
        x_sum[m_tile][quarter] = sum_octets<T, 2>(x[m_tile] + quarter * 8);
    }
  }

  template <class FindScales>
  __device__ __forceinline__ void add(const StageTile &tile, FindScales find_scales,
                                      bool accumulate, float *partial) const {
    constexpr Int4Pairs<T> pairs;
    const Int4Scales found = find_scales();
    float sums[MTiles][4] = {};
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      uint32_t w[2], w8[2];
      Layout::read_shared(tile, quarter, w, w8);
      const float scale = __shfl_sync(0xffffffffu, found.scale, quarter, 4);
      const float scale8 = __shfl_sync(0xffffffffu, found.scale8, quarter, 4);
      const uint32_t zeros = __shfl_sync(0xffffffffu, found.zeros, quarter, 4);
      const float offset = pairs.minus_low(zeros), offset8 = pairs.minus_high(zeros);
      float d[MTiles][4];
#pragma unroll
      for (int i = 0; i < MTiles; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          d[i][k] = multiply_rn(k < 2 ? offset : offset8,
                                k % 2 ? x_sum[i][quarter].y : x_sum[i][quarter].x);
      mma_word<T>(pairs, w[0], w8[0], x, quarter * 8, d);
      mma_word<T>(pairs, w[1], w8[1], x, quarter * 8 + 4, d);
#pragma unroll
      for (int i = 0; i < MTiles; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          sums[i][k] = __fmaf_rn(k < 2 ? scale : scale8, d[i][k], sums[i][k]);
    }
#pragma unroll
    for (auto &tile_sums : sums)
#pragma unroll
      for (float &sum : tile_sums) sum = multiply_rn(pairs.kUnit, sum);
    store_sums(FragmentLane(), sums, accumulate, partial);
  }
};

}  // namespace
}  // namespace nf4::cuda
