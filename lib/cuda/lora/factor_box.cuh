// A step of an adapter's factor in shared memory: the TMA loads that bring it there, and its
// fragments.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/element.cuh"
#include "cuda/lora/tma_args.hpp"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tma.cuh"

namespace nf4::cuda {
namespace {

// The offset of a 16-byte chunk in rows of 32, 64 or 128 bytes, in the swizzle of such boxes
// (tensor_map.hpp).
template <int kRowBytes = 128>
__device__ __forceinline__ int swizzled_chunk(int row, int chunk) {
  constexpr int kMask = kRowBytes / 16 - 1, kRows = 8 / (kMask + 1);
  return row * kRowBytes + (kRowBytes == 32 ? chunk : chunk ^ row / kRows % 8 & kMask) * 16;
}

// kRanks ranks of kLoraStep columns of `in`, from `rank` on, stored as rows of columns. `fragment`
// loads B of mma for the k-th 16 columns and the i-th 16 ranks, 8 ranks in a pair of registers.
template <class T, class F, bool kGradient, int kRanks>
struct LoraFactorBox {
  static __device__ __forceinline__ void load(uint8_t *to, const void *map, int column, int rank,
                                              uint64_t *barrier) {
    tma_load_2d(to, map, column * int{sizeof(T)}, rank, barrier);
  }
  static __device__ __forceinline__ void fragment(const uint8_t *box, int i, int k,
                                                  uint32_t (&b)[4]) {
    const int lane = threadIdx.x % 32, rank = i * 16 + lane / 16 * 8 + lane % 8;
    ldmatrix_x4(b, box + swizzled_chunk(rank, k * 2 + lane / 8 % 2));
  }
  // Returns which of 8 ranks is column n of a pair's product.
  static __device__ __forceinline__ int rank_of(int n) { return n; }
};

// The factor is fp32 and rounded to x's dtype: two boxes of 32 columns.
template <class T, int kRanks>
struct LoraFactorBox<T, float, false, kRanks> {
  static constexpr int kBoxBytes = kRanks * 128;

  static __device__ __forceinline__ void load(uint8_t *to, const void *map, int column, int rank,
                                              uint64_t *barrier) {
    tma_load_2d(to, map, column * 4, rank, barrier);
    tma_load_2d(to + kBoxBytes, map, column * 4 + 128, rank, barrier);
  }
  static __device__ __forceinline__ void fragment(const uint8_t *box, int i, int k,
                                                  uint32_t (&b)[4]) {
    const int rank = rank_of(threadIdx.x % 32 / 4), thread_in_group = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int chunk = k % 2 * 4 + j % 2 * 2 + thread_in_group / 2;
      const uint8_t *const at = box + k / 2 * kBoxBytes +
                                swizzled_chunk(i * 16 + j / 2 * 8 + rank, chunk) +
                                thread_in_group % 2 * 8;
      const float2 pair = *reinterpret_cast<const float2 *>(at);
      b[j] = pack_pair(T{}, pair.x, pair.y);
    }
  }
  // Neighbouring ranks have their 32 bytes in the same banks; this order makes half of a warp read
  // different banks.
  static __device__ __forceinline__ int rank_of(int n) { return n % 4 * 2 + n / 4; }
};

// In the gradient the factor has rows of ranks, with a box for each 128 bytes of them.
template <class F, int kRanks>
struct LoraRankRows {
  static constexpr int kRowBytes = lora_rank_box_bytes(kRanks, sizeof(F));
  static constexpr int kBoxRanks = kRowBytes / int{sizeof(F)};

  static __device__ __forceinline__ void load(uint8_t *to, const void *map, int column, int rank,
                                              uint64_t *barrier) {
#pragma unroll
    for (int i = 0; i < kRanks / kBoxRanks; ++i)
      tma_load_2d(to + i * kLoraStep * kRowBytes, map, (rank + i * kBoxRanks) * int{sizeof(F)},
                  column, barrier);
  }
  // The chunk of ranks that fill 16 bytes; `rank` is the first of them.
  static __device__ __forceinline__ const uint8_t *chunk(const uint8_t *box, int row, int rank) {
    return box + rank / kBoxRanks * kLoraStep * kRowBytes +
           swizzled_chunk<kRowBytes>(row, rank % kBoxRanks * int{sizeof(F)} / 16);
  }
  static __device__ __forceinline__ int rank_of(int n) { return n; }
};

template <class T, class F, int kRanks>
struct LoraFactorBox<T, F, true, kRanks> : LoraRankRows<F, kRanks> {
  static __device__ __forceinline__ void fragment(const uint8_t *box, int i, int k,
                                                  uint32_t (&b)[4]) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4_trans(
        b, LoraRankRows<F, kRanks>::chunk(box, k * 16 + lane % 16, i * 16 + lane / 16 * 8));
  }
};

template <class T, int kRanks>
struct LoraFactorBox<T, float, true, kRanks> : LoraRankRows<float, kRanks> {
  static __device__ __forceinline__ float element(const uint8_t *box, int row, int rank) {
    const uint8_t *const chunk = LoraRankRows<float, kRanks>::chunk(box, row, rank / 4 * 4);
    return reinterpret_cast<const float *>(chunk)[rank % 4];
  }
  static __device__ __forceinline__ void fragment(const uint8_t *box, int i, int k,
                                                  uint32_t (&b)[4]) {
    const int group_id = threadIdx.x % 32 / 4, thread_in_group = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = k * 16 + j % 2 * 8 + thread_in_group * 2;
      const int rank = i * 16 + j / 2 * 8 + group_id;
      b[j] = pack_pair(T{}, element(box, row, rank), element(box, row + 1, rank));
    }
  }
};

}  // namespace
}  // namespace nf4::cuda
