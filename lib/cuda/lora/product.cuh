// The product of x with an adapter's A: p = x A^T, [m][rank], and a copy times the scale, which the
// kernels of the base product multiply by B. Each output is summed in fp32 in a fixed order.
//
// lora_product multiplies with mma.sync straight from global memory. A warp has 16 or 32 rows of x
// and every 8th group of 32 columns of its CTA, which adds up its warps' sums in shared memory; the
// CTAs of a cluster share the columns. lora_product_any serves any stride, dtype and GPU, with a
// warp for each output.
//
// With few rows latency is the bound, then reading x once. docs/design/lora.md has the experiments.
#pragma once

#include <cuda_runtime.h>

#include "cuda/arch.cuh"
#include "cuda/element.cuh"
#include "cuda/lora/args.hpp"
#include "cuda/lora/term.cuh"
#include "cuda/lora/tile.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

// The row of the output for row `row` of wgmma's A in transposed kernels: TransposedLayout gives a
// lane four neighbours, two in each warp of a pair.
__device__ __forceinline__ int64_t transposed_row(int64_t row) {
  const int in_pair = static_cast<int>(row % 32), in_warp = in_pair % 16;
  return row - in_pair + in_warp % 8 * 4 + in_pair / 16 * 2 + in_warp / 8;
}

// The CTAs that copy `out`, whose elements are of type F: eight ranks of a row per thread.
template <class T, class F>
__device__ __forceinline__ void copy_out(const LoraProductArgs &args, int cta) {
  const int row_vectors = args.stride / 8;
  const int64_t vectors = (args.out_rows + 31) / 32 * 32 * row_vectors;
  const int64_t step = int64_t{args.copy_ctas} * blockDim.x;
  for (int64_t i = int64_t{cta} * blockDim.x + threadIdx.x; i < vectors; i += step) {
    const int64_t row = i / row_vectors, from = args.permuted ? transposed_row(row) : row;
    const int first = static_cast<int>(i - row * row_vectors) * 8;
    const F *const elements = static_cast<const F *>(args.out.data) + from * args.out.stride;
    float values[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const bool in_bounds = from < args.out_rows && first + r < args.rank;
      values[r] = in_bounds ? to_float(elements[(first + r) * args.out.rank_stride]) : 0.0f;
    }
    if constexpr (sizeof(T) == 2)
      *reinterpret_cast<uint4 *>(static_cast<T *>(args.out_copy) + i * 8) = pack_vector<T>(values);
  }
}

template <class T>
__device__ __forceinline__ void store_product(const LoraProductArgs &args, int64_t m, int r,
                                              float sum) {
  if (m >= args.m || r >= args.stride) return;
  static_cast<T *>(args.scaled)[m * args.stride + r] = from_float<T>(sum * args.scale);
  if (args.product != nullptr && r < args.rank)
    static_cast<T *>(args.product)[m * args.rank + r] = from_float<T>(sum);
}

constexpr int kLoraWarps = kLoraProductThreads / 32;
// The warps whose sums are in shared memory at a time.
template <class Tile>
constexpr int kStoredWarps =
    kLoraWarps * Tile::kOutputs * 4 <= 32 << 10 ? kLoraWarps : (8 << 10) / Tile::kOutputs;

// All threads of the CTA call it. It leaves the sums of the first kStoredWarps warps in
// partials[warp][index][lane], after it has added those of later warps to them.
template <class Tile>
__device__ __forceinline__ void store_partials(Tile &tile, float *partials) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto at = [&](int warp, int index) -> float & {
    return partials[(warp * Tile::kSums + index) * 32 + lane];
  };
#pragma unroll
  for (int first = kLoraWarps - kStoredWarps<Tile>; first >= 0; first -= kStoredWarps<Tile>) {
    if (warp / kStoredWarps<Tile> == first / kStoredWarps<Tile>)
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i) {
        float &to = at(warp - first, i);
        to = first == kLoraWarps - kStoredWarps<Tile> ? tile.sum(i) : to + tile.sum(i);
      }
    __syncthreads();
  }
}

template <class Arch>
__device__ __forceinline__ int rank_in_cluster(const LoraProductArgs &args) {
  if constexpr (Arch::kClusters)
    if (args.cluster_log2 > 0) return static_cast<int>(cluster_rank());
  return 0;
}

// Prefetches into L2 the ranks that a lane loads first.
template <class F, int Ranks>
__device__ __forceinline__ void prefetch_a(const LoraProductArgs &args, int first_rank, int step) {
  const int64_t column = int64_t{step} * 32 + threadIdx.x % 32 / 16 * 16;
#pragma unroll
  for (int i = 0; i < Ranks; i += 16) {
    const int r = first_rank + i + threadIdx.x % 16;
    if (r < args.rank && column < args.cols)
      prefetch_l2_sector(static_cast<const F *>(args.in.data) + r * args.in.rank_stride + column);
  }
}

// Rows of x and of A are on 16-byte boundaries, and cols is a multiple of 8.
template <class Arch, class T, class F, bool kGradient, int MTiles, int RankTiles>
__global__ void __launch_bounds__(kLoraProductThreads, 2)
    lora_product(const __grid_constant__ LoraProductArgs args) {
  using Tile = LoraTile<MTiles, RankTiles>;
  __shared__ float partials[kStoredWarps<Tile> * Tile::kOutputs];
  __shared__ float received[Tile::kOutputs];  // [CTA of the cluster][share]
  const int copy_cta = static_cast<int>(blockIdx.x) - args.product_ctas;
  if (copy_cta >= 0) {
    pdl_wait<Arch>();
    pdl_launch_dependents<Arch>();
    return copy_out<T, F>(args, copy_cta);
  }
  const int warp = threadIdx.x / 32;
  const int in_cluster = rank_in_cluster<Arch>(args);
  const int tile_index = static_cast<int>(blockIdx.x) >> args.cluster_log2;
  const int m_tile = args.rank_chunks == 1 ? tile_index : tile_index / args.rank_chunks;
  const int first_rank = (tile_index - m_tile * args.rank_chunks) * Tile::kRanks;
  const int64_t first_m = int64_t{m_tile} * Tile::kM;
  const int steps = static_cast<int>((args.cols + 31) / 32);
  const int begin = steps * in_cluster >> args.cluster_log2;
  const int end = steps * (in_cluster + 1) >> args.cluster_log2;
  // This is allowed while the predecessor still writes.
  if constexpr (!kGradient) prefetch_a<F, Tile::kRanks>(args, first_rank, begin + warp);
  // All CTAs of the cluster must run before one writes to another's shared memory.
  if constexpr (Arch::kClusters)
    if (args.cluster_log2 > 0) cluster_sync_relaxed();
  pdl_wait<Arch>();
  // This must not come earlier: the dependent waits for this kernel only before it reads this
  // kernel's output.
  pdl_launch_dependents<Arch>();

  Tile tile;
#pragma unroll 1
  for (int step = begin + warp; step < end; step += Tile::kDepth * kLoraWarps) {
    typename Tile::Fragments fragments[Tile::kDepth];
#pragma unroll
    for (int i = 0; i < Tile::kDepth; ++i)
      Tile::template load<T, F, kGradient>(args, first_m, first_rank, step + i * kLoraWarps, end,
                                           fragments[i]);
#pragma unroll
    for (int i = 0; i < Tile::kDepth; ++i) tile.template add<T>(fragments[i]);
  }
  store_partials(tile, partials);

  const int share = Tile::kOutputs >> args.cluster_log2;
  for (int output = threadIdx.x; output < Tile::kOutputs; output += kLoraProductThreads) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kStoredWarps<Tile>; ++i) sum += partials[i * Tile::kOutputs + output];
    if constexpr (Arch::kClusters)
      if (args.cluster_log2 > 0) {
        const int owner = static_cast<int>(static_cast<unsigned>(output) / share);
        float *const to = received + in_cluster * share + output - owner * share;
        store_shared_cluster(map_shared_rank(to, owner), sum);
        continue;
      }
    store_product<T>(args, first_m + Tile::row(output),
                     first_rank + Tile::template rank<RanksInOrder>(output), sum);
  }
  if constexpr (Arch::kClusters) {
    if (args.cluster_log2 == 0) return;
    cluster_sync();
    for (int i = threadIdx.x; i < share; i += kLoraProductThreads) {
      float sum = 0;
#pragma unroll
      for (int source = 0; source < 1 << kMaxLoraClusterLog2; ++source)
        if (source < 1 << args.cluster_log2) sum += received[source * share + i];
      const int output = in_cluster * share + i;
      store_product<T>(args, first_m + Tile::row(output),
                       first_rank + Tile::template rank<RanksInOrder>(output), sum);
    }
  }
}

template <class Arch, class T>
__global__ void __launch_bounds__(kLoraProductThreads)
    lora_product_any(const __grid_constant__ LoraProductArgs args) {
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  const int copy_cta = static_cast<int>(blockIdx.x) - args.product_ctas;
  if (copy_cta >= 0)
    return args.out.is_fp32 ? copy_out<T, float>(args, copy_cta) : copy_out<T, T>(args, copy_cta);
  const int64_t output = int64_t{blockIdx.x} * (kLoraProductThreads / 32) + threadIdx.x / 32;
  const int64_t m = output / args.stride;
  const int r = static_cast<int>(output - m * args.stride), lane = threadIdx.x % 32;
  if (m >= args.m) return;
  float sum = 0;
  const T *const x = static_cast<const T *>(args.x) + m * args.x_stride;
  if (r < args.rank)
    for (int64_t k = lane; k < args.cols; k += 32)
      sum = __fmaf_rn(to_float(x[k]), lora_element<T>(args.in, r, k), sum);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (lane == 0) store_product<T>(args, m, r, sum);
}

}  // namespace
}  // namespace nf4::cuda
