// A tile of the product of x with an adapter's A (in the gradient B), with mma.sync straight from
// global memory.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/ptx/mma.cuh"

namespace nf4::cuda {
namespace {

// Eight columns of a row as two k16 steps of a fragment. Any order of the columns works if x and A
// have the same.
template <class T, class F>
__device__ __forceinline__ uint4 load_fragment(const F *from, bool in_bounds) {
  if (!in_bounds) return {};
  if constexpr (std::is_same_v<T, F>) return *reinterpret_cast<const uint4 *>(from);
  const float4 low = reinterpret_cast<const float4 *>(from)[0];
  const float4 high = reinterpret_cast<const float4 *>(from)[1];
  return {pack_pair(T{}, low.x, low.y), pack_pair(T{}, low.z, low.w),
          pack_pair(T{}, high.x, high.y), pack_pair(T{}, high.z, high.w)};
}

// The same for eight elements at a stride.
template <class T, class F>
__device__ __forceinline__ uint4 load_strided_fragment(const F *from, int64_t stride,
                                                       bool in_bounds) {
  float values[8] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (in_bounds) values[i] = to_float(from[i * stride]);
  return pack_vector<T>(values);
}

struct RanksInOrder {
  static __device__ __forceinline__ int rank_of(int n) { return n; }
};

// A tile of MTiles * 16 rows of x by RankTiles * 8 ranks.
template <int MTiles, int RankTiles>
struct LoraTile {
  static constexpr int kM = MTiles * 16, kRanks = RankTiles * 8;
  static constexpr int kSums = MTiles * RankTiles * 4;  // per lane
  static constexpr int kOutputs = kSums * 32;
  static constexpr int kDepth = RankTiles > 4 ? 1 : 2;  // steps of 32 columns in flight

  float sums[MTiles][RankTiles][4] = {};

  // The elements of a step that a lane has: eight columns of two rows of x for each of MTiles, and
  // of a rank for each of RankTiles.
  struct Fragments {
    uint4 x[MTiles][2], a[RankTiles];
  };

  // With kGradient, the elements of a rank are not neighbours.
  template <class T, class F, bool kGradient, class Args>
  static __device__ __forceinline__ void load(const Args &args, int64_t first_m, int first_rank,
                                              int step, int end, Fragments &to) {
    const int group_id = threadIdx.x % 32 / 4, thread_in_group = threadIdx.x % 4;
    const int64_t column = int64_t{step} * 32 + thread_in_group * 8;
    const bool in_row = step < end && column < args.cols;
#pragma unroll
    for (int i = 0; i < MTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t m = first_m + i * 16 + half * 8 + group_id;
        to.x[i][half] = load_fragment<T>(
            static_cast<const T *>(args.x) + m * args.x_stride + column, in_row && m < args.m);
      }
#pragma unroll
    for (int j = 0; j < RankTiles; ++j) {
      const int r = first_rank + j * 8 + group_id;
      const bool in_bounds = in_row && r < args.rank;
      const F *const from = static_cast<const F *>(args.in.data) + r * args.in.rank_stride +
                            column * (kGradient ? args.in.stride : 1);
      if constexpr (kGradient)
        to.a[j] = load_strided_fragment<T>(from, args.in.stride, in_bounds);
      else
        to.a[j] = load_fragment<T>(from, in_bounds);
    }
  }

  template <class T>
  __device__ __forceinline__ void add(const Fragments &fragments) {
#pragma unroll
    for (int j = 0; j < RankTiles; ++j)
#pragma unroll
      for (int i = 0; i < MTiles; ++i) {
        const uint4 low = fragments.x[i][0], high = fragments.x[i][1], a = fragments.a[j];
        mma_m16n8k16(T{}, sums[i][j], {low.x, high.x, low.y, high.y}, a.x, a.y);
        mma_m16n8k16(T{}, sums[i][j], {low.z, high.z, low.w, high.w}, a.z, a.w);
      }
  }

  // The sum with number `index` of this lane.
  __device__ __forceinline__ float &sum(int index) {
    return sums[index / (RankTiles * 4)][index / 4 % RankTiles][index % 4];
  }
  static __device__ __forceinline__ int row(int output) {
    const int index = output / 32, lane = output % 32;
    return index / (RankTiles * 4) * 16 + lane / 4 + index % 4 / 2 * 8;
  }
  // `Order::rank_of` says which of 8 ranks is a column of B of mma.
  template <class Order>
  static __device__ __forceinline__ int rank(int output) {
    const int index = output / 32, lane = output % 32;
    return index / 4 % RankTiles * 8 + Order::rank_of(lane % 4 * 2 + index % 2);
  }
};

}  // namespace
}  // namespace nf4::cuda
