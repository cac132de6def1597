// The kernel of mma_64x64 for integer weights and up to 16 rows of x, on GPUs with tensor cores:
// like matmul_mma, with a tile of 16 rows of x. On GPUs with clusters, the CTAs of a cluster share
// K.
//
// A CTA has 64 rows of the weight; four of its warps multiply the first half of a K-tile's columns,
// and four the second. The partial sums of both, and of the cluster's CTAs, are added in a fixed
// order through shared memory. The bound is about 150 instructions per warp and K-tile, most of
// them for decoding.
#pragma once

#include "cuda/matmul/args.hpp"
#include "cuda/matmul/mma/launch.hpp"
#include "cuda/matmul/mma/smem_tile.cuh"
#include "cuda/matmul/mma/x.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

constexpr int kFewWarpRows = kMmaTileN / 16;                // in warps
constexpr int kFewParts = kMmaThreads / 32 / kFewWarpRows;  // parts of a K-tile's columns
constexpr int kFewXChunks = kFewRowsOfX * kMmaTileK / 8;    // chunks of 16 bytes
constexpr int kFewOutputs = kMmaTileN * kFewRowsOfX;

// A warp's 16 x 16 outputs of y, summed over its part of the columns.
template <class T>
struct FewMma {
  float sums[2][4] = {};

  static __device__ __forceinline__ int row() { return threadIdx.x / 32 % kFewWarpRows * 16; }
  static __device__ __forceinline__ int part() { return threadIdx.x / 32 / kFewWarpRows; }

  __device__ __forceinline__ void add(const SmemTile<T> &w, const SmemTile<T> &x) {
#pragma unroll
    for (int step = 0; step < kMmaTileK / 16 / kFewParts; ++step) {
      const int column = (part() * (kMmaTileK / 16 / kFewParts) + step) * 16;
      uint32_t a[4], b[4];
      w.load_a(a, row(), column);
      x.load_b(b, 0, column);
      mma_m16n8k16(T{}, sums[0], a, b[0], b[1]);
      mma_m16n8k16(T{}, sums[1], a, b[2], b[3]);
    }
  }

  // partials[part][row of x][row of W]
  __device__ __forceinline__ void store(float *partials) const {
    const int group_id = threadIdx.x % 32 / 4, thread_in_group = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int m = n * 8 + thread_in_group * 2 + k % 2;
        partials[part() * kFewOutputs + m * kMmaTileN + row() + group_id + k / 2 * 8] = sums[n][k];
      }
  }
};

// The CTAs of a cluster, or only this CTA.
template <class Arch>
struct SplitK {
  int ctas;
  uint32_t rank;

  __device__ __forceinline__ explicit SplitK(int cluster_size)
      : ctas(Arch::kClusters ? cluster_size : 1), rank(0) {
    if constexpr (Arch::kClusters) rank = cluster_rank();
  }
  __device__ __forceinline__ void sync() const {
    if constexpr (Arch::kClusters)
      cluster_sync();
    else
      __syncthreads();
  }
  __device__ __forceinline__ float load(const float *own, int of_rank) const {
    if constexpr (Arch::kClusters) return load_shared_cluster(map_shared_rank(own, of_rank));
    return *own;
  }
};

template <class Arch, class T, class Source>
__global__ void __launch_bounds__(kMmaThreads, 2)
    matmul_mma_few(const __grid_constant__ Int4FewArgs few) {
  constexpr int kDepth = Source::kPrefetch;  // in K-tiles
  const Int4MatmulArgs &args = few.matmul;
  __shared__ uint4 w_chunks[2][kMmaTileN * 8];
  __shared__ uint4 x_chunks[2][kFewXChunks];
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  const SplitK<Arch> split(few.cluster_size);
  const int64_t first_n = int64_t{blockIdx.x} / split.ctas * kMmaTileN;
  const int64_t all_k_tiles = (args.weight.cols + kMmaTileK - 1) / kMmaTileK;
  const int64_t first_k_tile = all_k_tiles * split.rank / split.ctas;
  const int64_t k_tiles = all_k_tiles * (split.rank + 1) / split.ctas - first_k_tile;
  const int64_t own_row = first_n + Source::tile_row();
  const int x_row = threadIdx.x / 8, x_chunk = threadIdx.x % 8;
  const bool has_x = threadIdx.x < kFewXChunks;

  Source weight(args, nullptr, nullptr);
  typename Source::Registers codes[kDepth];
  uint4 values[kDepth][1];
  const auto load = [&](int stage, int64_t k_tile) {
    const int64_t k = (first_k_tile + k_tile) * kMmaTileK;
    codes[stage] = weight.load(own_row, k + Source::tile_column());
    if (has_x) load_x<T>(args, x_row, k + x_chunk * 8, values[stage]);
  };
  weight.seek(own_row, first_k_tile * kMmaTileK + Source::tile_column());
#pragma unroll
  for (int stage = 0; stage < kDepth; ++stage)
    if (stage < k_tiles) load(stage, stage);

  FewMma<T> mma;
  int buffer = 0;
  for (int64_t k_tile = 0; k_tile < k_tiles;) {
#pragma unroll
    for (int stage = 0; stage < kDepth; ++stage) {
      if (k_tile >= k_tiles) break;
      const SmemTile<T> w(w_chunks[buffer]), x(x_chunks[buffer]);
      weight.store(codes[stage], w);
      if (has_x) x.chunk(x_row, x_chunk) = values[stage][0];
      __syncthreads();
      if (k_tile + kDepth < k_tiles) load(stage, k_tile + kDepth);
      mma.add(w, x);
      buffer ^= 1;
      ++k_tile;
    }
  }

  __syncthreads();
  float *const partials = reinterpret_cast<float *>(w_chunks);
  static_assert(kFewParts * kFewOutputs * sizeof(float) <= sizeof w_chunks);
  mma.store(partials);
  split.sync();
  const T *bias = static_cast<const T *>(args.bias);
  T *y = static_cast<T *>(args.y);
  const int step = split.ctas * kMmaThreads;
  for (int i = split.rank * kMmaThreads + threadIdx.x; i < kFewOutputs; i += step) {
    const int64_t n = first_n + i % kMmaTileN, m = i / kMmaTileN;
    if (n >= args.weight.rows || m >= args.m) continue;
    float sum = bias == nullptr ? 0.0f : to_float(bias[n]);
    for (int rank = 0; rank < split.ctas; ++rank)
#pragma unroll
      for (int part = 0; part < kFewParts; ++part)
        sum += split.load(partials + part * kFewOutputs + i, rank);
    y[m * args.y_stride + n] = from_float<T>(sum);
  }
  split.sync();
}

}  // namespace
}  // namespace nf4::cuda
