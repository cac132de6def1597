// The absmax of each block, over a lane's elements, over the lanes of a warp, and over warps; and
// the sum of a CTA's scales.
//
// A warp has a tile of kSteps steps; in each step a lane has a run of 8 elements. At the end, lane
// l has the absmax of the block that contains its run of step l % kSteps.
#pragma once

#include <cuda_runtime.h>

#include <cstring>
#include <type_traits>

#include "core/encode.hpp"
#include "cuda/element.cuh"
#include "cuda/quantize/args.hpp"

namespace nf4::cuda {
namespace {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kRun = 8;  // the codes of a run are one word
constexpr int kStep = 32 * kRun;
constexpr int kSteps = 4;
constexpr int kTile = kSteps * kStep;
constexpr int kWarps = kQuantizeThreads / 32;
static_assert(kWarps * kTile == kQuantizeCtaTile);

// A run as it is in memory.
template <class T>
struct Run {
  uint4 vectors[sizeof(T) / 2];
};

// The larger magnitude, of floats or of pairs of 16-bit elements; not finite if either is not.
// Taken as integers, magnitudes are in order, with infinity and NaN above the others. The signs of
// the result have no meaning.
template <class T>
__device__ __forceinline__ uint32_t max_magnitude(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 860
  // These GPUs have one instruction for it.
  uint32_t result;
  if constexpr (sizeof(T) == 4)
    asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  else if constexpr (std::is_same_v<T, __half>)
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  else
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  if constexpr (sizeof(T) == 4) return max(a & 0x7fffffffu, b & 0x7fffffffu);
  return __vmaxu2(a & 0x7fff7fffu, b & 0x7fff7fffu);
#endif
}

// The larger of the two magnitudes of a pair; a float is alone.
template <class T>
__device__ __forceinline__ float pair_max(uint32_t pair) {
  if constexpr (sizeof(T) == 4) return __uint_as_float(pair & 0x7fffffffu);
  const uint32_t larger = max(pair & 0x7fffu, pair >> 16 & 0x7fffu);
  if constexpr (std::is_same_v<T, __half>)
    return __half2float(__ushort_as_half(static_cast<unsigned short>(larger)));
  return __uint_as_float(larger << 16);
}

template <class T>
__device__ __forceinline__ uint32_t run_max(const Run<T> &run) {
  constexpr int kWords = sizeof(Run<T>) / 4;
  const uint32_t *words = reinterpret_cast<const uint32_t *>(&run);
  uint32_t largest = max_magnitude<T>(words[0], words[1]);
#pragma unroll
  for (int i = 2; i < kWords; ++i) largest = max_magnitude<T>(largest, words[i]);
  return largest;
}

// The largest finite magnitude of a run, in the form of run_max(). It reads the elements again: if
// it got them in registers, the compiler would keep them in local memory for every thread.
template <class T>
__device__ __noinline__ uint32_t finite_run_max(const T *in, int64_t count) {
  uint32_t largest = 0;
  for (int k = 0; k < min(count, int64_t{kRun}); ++k) {
    uint32_t bits = 0;
    if (is_finite(to_float(in[k]))) memcpy(&bits, in + k, sizeof(T));
    largest = max_magnitude<T>(largest, bits);
  }
  return largest;
}

// Reduces each lane's maximum of each step over kSteps consecutive lanes: lane l of them gets step
// l. Each exchange halves the number of steps that a lane holds.
template <class T>
__device__ __forceinline__ uint32_t scatter_max(const uint32_t (&steps)[kSteps]) {
  uint32_t maxima[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) maxima[i] = steps[i];
#pragma unroll
  for (int left = kSteps / 2, distance = 1; left > 0; left /= 2, distance *= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const uint32_t keep = upper ? maxima[2 * i + 1] : maxima[2 * i];
      const uint32_t give = upper ? maxima[2 * i] : maxima[2 * i + 1];
      maxima[i] = max_magnitude<T>(keep, __shfl_xor_sync(kFullWarp, give, distance));
    }
  }
  return maxima[0];
}

// After scatter_max(), lanes this far apart are neighbours in the tensor, 32 elements apart at
// level 0, then 64, 128 and so on: first within a step, then across steps. From some blocksize on
// they share a block; below it, they are in neighbouring blocks.
constexpr int kNeighborLevels = 5;
__device__ constexpr int neighbour_distance(int level) {
  return kSteps << level < 32 ? kSteps << level : (kSteps << level) / 32;
}
__device__ constexpr bool share_block(int level, int blocksize_log2) {
  return 1 << blocksize_log2 >= kSteps * kRun * 2 << level;
}

// The absmax of each lane's block, as far as the warp has the block.
template <class T>
__device__ __forceinline__ float warp_absmax(const uint32_t (&steps)[kSteps], int blocksize_log2) {
  uint32_t pair = scatter_max<T>(steps);
#pragma unroll
  for (int level = 0; level < kNeighborLevels; ++level)
    if (share_block(level, blocksize_log2))
      pair = max_magnitude<T>(pair, __shfl_xor_sync(kFullWarp, pair, neighbour_distance(level)));
  return pair_max<T>(pair);
}

// Extends it over the warps of blocks that are longer than a tile. Contains a barrier.
__device__ __forceinline__ float across_warps(float absmax, int blocksize_log2) {
  __shared__ float warps_absmax[kWarps];
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) warps_absmax[warp] = absmax;
  __syncthreads();
  const int warps = (1 << blocksize_log2) / kTile;  // a power of two
  const int first = warp & -warps;
  for (int i = 0; i < warps; ++i) absmax = fmaxf(absmax, warps_absmax[first + i]);
  return absmax;
}

// The sum of a CTA's scales, at most kMaxScales, over the complete binary tree. One warp computes
// it; its lane 0 has the result.
constexpr int kMaxScales = kQuantizeCtaTile / kMinBlocksize;
__device__ __forceinline__ double sum_scales(const float *scales, int count) {
  constexpr int kLeaves = kMaxScales / 32;
  const int first = threadIdx.x % 32 * kLeaves;
  double v[kLeaves];
#pragma unroll
  for (int k = 0; k < kLeaves; ++k) v[k] = first + k < count ? scales[first + k] : 0.0f;
#pragma unroll
  for (int left = kLeaves / 2; left > 0; left /= 2)
#pragma unroll
    for (int k = 0; k < left; ++k) v[k] = v[2 * k] + v[2 * k + 1];
  double sum = v[0];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
    sum += __shfl_xor_sync(kFullWarp, sum, distance);
  return sum;
}

}  // namespace
}  // namespace nf4::cuda
