// The largest magnitude of each block: over a lane's elements, over the lanes of a warp, and
// over warps; and the sum of those of a thread block.
//
// A warp has a tile of kSteps steps, in which a lane takes a run of 8 elements each. In the
// end lane l knows the absmax of the block that its run of step l % kSteps is in.
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
static_assert(kWarps * kTile == kQuantizeElementsPerBlock);

// A run as it is in memory.
template <class T>
struct Run {
  uint4 vectors[sizeof(T) / 2];
};

// The larger magnitude, of floats or of pairs of 16-bit elements; not finite if either is
// not: as integers, magnitudes are in order, infinity and NaN above the others.
template <class T>
__device__ __forceinline__ uint32_t max_magnitude(uint32_t a, uint32_t b) {
  if constexpr (sizeof(T) == 4) return max(a & 0x7fffffffu, b & 0x7fffffffu);
#if __CUDA_ARCH__ >= 800
  // One instruction on these GPUs.
  uint32_t result;
  if constexpr (std::is_same_v<T, __half>)
    asm("{.reg .b32 x, y; abs.f16x2 x, %1; abs.f16x2 y, %2; max.NaN.f16x2 %0, x, y;}"
        : "=r"(result)
        : "r"(a), "r"(b));
  else
    asm("{.reg .b32 x, y; abs.bf16x2 x, %1; abs.bf16x2 y, %2; max.NaN.bf16x2 %0, x, y;}"
        : "=r"(result)
        : "r"(a), "r"(b));
  return result;
#else
  return __vmaxu2(a & 0x7fff7fffu, b & 0x7fff7fffu);
#endif
}

// The larger of the two magnitudes of a pair; a float is alone.
template <class T>
__device__ __forceinline__ float pair_max(uint32_t pair) {
  if constexpr (sizeof(T) == 4) return __uint_as_float(pair);
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

// The largest finite magnitude of a run, as run_max() gives it. It reads the elements
// again: given registers, it made the compiler keep those in local memory for every thread.
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

// From each lane's maximum of each step, that of four lanes in a row: lane l of them gets
// step l. Each exchange halves the number of steps that a lane answers for.
template <class T>
__device__ __forceinline__ uint32_t scatter_max(const uint32_t (&steps)[kSteps]) {
  static_assert(kSteps == 4);
  const bool odd = threadIdx.x & 1;
  uint32_t halves[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t keep = odd ? steps[2 * i + 1] : steps[2 * i];
    const uint32_t give = odd ? steps[2 * i] : steps[2 * i + 1];
    halves[i] = max_magnitude<T>(keep, __shfl_xor_sync(kFullWarp, give, 1));
  }
  const bool upper = threadIdx.x & 2;
  const uint32_t keep = upper ? halves[1] : halves[0];
  const uint32_t give = upper ? halves[0] : halves[1];
  return max_magnitude<T>(keep, __shfl_xor_sync(kFullWarp, give, 2));
}

// After scatter_max(), lanes this far apart are neighbours in the tensor, at 32, 64, ... 512
// elements: first of a step, then steps. They share a block from blocksize 64, 128, ... 1024
// on; up to that, they are neighbouring blocks.
constexpr int kNeighbourLevels = 5;
__device__ constexpr int neighbour_distance(int level) {
  return level < 3 ? 4 << level : 1 << (level - 3);
}
__device__ constexpr bool share_block(int level, int blocksize_log2) {
  return blocksize_log2 >= 6 + level;
}

// The absmax of each lane's block, as far as the warp has it.
template <class T>
__device__ __forceinline__ float warp_absmax(const uint32_t (&steps)[kSteps], int blocksize_log2) {
  uint32_t pair = scatter_max<T>(steps);
#pragma unroll
  for (int level = 0; level < kNeighbourLevels; ++level)
    if (share_block(level, blocksize_log2))
      pair = max_magnitude<T>(pair, __shfl_xor_sync(kFullWarp, pair, neighbour_distance(level)));
  return pair_max<T>(pair);
}

// Over the warps of blocks that are longer than a tile. A barrier.
__device__ __forceinline__ float across_warps(float absmax, int blocksize_log2) {
  __shared__ float warps_absmax[kWarps];
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) warps_absmax[warp] = absmax;
  __syncthreads();
  const int warps = (1 << blocksize_log2) / kTile;
  const int first = warp / warps * warps;
  for (int i = 0; i < warps; ++i) absmax = fmaxf(absmax, warps_absmax[first + i]);
  return absmax;
}

// The sum of the scales of a warp's tile over the complete binary tree, neighbours first.
__device__ __forceinline__ double warp_sum(float absmax, int blocksize_log2) {
  double sum = absmax;
#pragma unroll
  for (int level = 0; level < kNeighbourLevels; ++level)
    if (!share_block(level, blocksize_log2))
      sum += __shfl_xor_sync(kFullWarp, sum, neighbour_distance(level));
  return sum;
}

}  // namespace
}  // namespace nf4::cuda
