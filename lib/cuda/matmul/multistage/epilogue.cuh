// The epilogue of the multistage kernels: the exchange of partial sums, the bias, and stores of y.
#pragma once

#include <cstdint>

#include "cuda/element.cuh"
#include "cuda/lora/term.cuh"
#include "cuda/matmul/args.hpp"
#include "cuda/matmul/multistage/partials.cuh"
#include "cuda/matmul/multistage/scheduler.hpp"
#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/ptx/mma.cuh"

namespace nf4::cuda {
namespace {

// Exchanges sums through the workspace. A tile's last CTA adds the others' to its own, in their
// order.
template <class Args, int MTiles>
class StreamKReduction {
  using Sums = float[2][MTiles][4];
  static constexpr int kTogether = 4;  // CTAs whose sums are in flight

 public:
  __device__ __forceinline__ explicit StreamKReduction(const Args &args)
      : partials_(args), signature_(args.signature) {}

  // Tells the CTA that stores the tile that this CTA's sums are stored.
  __device__ __forceinline__ void announce() const {
    __syncthreads();
    if (threadIdx.x == 0)
      partials_.flag(blockIdx.x).store(signature_, ::cuda::memory_order_release);
  }

  // Adds the sums of the CTAs from first_peer on, in their order.
  __device__ __forceinline__ void add_peers(int first_peer, int m_tiles, Sums &sums) const {
    const int cta = static_cast<int>(blockIdx.x), warp = static_cast<int>(threadIdx.x / 32);
    if (first_peer == cta) return;
    for (int peer = first_peer + static_cast<int>(threadIdx.x); peer < cta;
         peer += kMultistageThreads)
      while (partials_.flag(peer).load(::cuda::memory_order_acquire) != signature_) continue;
    __syncthreads();
    for (int peer = first_peer; peer < cta; peer += kTogether) {
#pragma unroll
      for (int m = 0; m < MTiles; ++m) {
        float4 all[kTogether][2];
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
#pragma unroll
          for (int f = 0; f < 2; ++f)
            all[i][f] =
                peer + i < cta && m < m_tiles ? partials_.load(peer + i, warp, f, m) : float4{};
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
#pragma unroll
          for (int f = 0; f < 2; ++f) add(sums[f][m], all[i][f]);
      }
    }
    __syncthreads();
    // For the next launch with these arguments.
    for (int peer = first_peer + static_cast<int>(threadIdx.x); peer < cta;
         peer += kMultistageThreads)
      partials_.flag(peer).store(0, ::cuda::memory_order_relaxed);
  }

 private:
  const StreamKPartials<Args, MTiles> partials_;
  const uint64_t signature_;
};

// Adds the product of an adapter, scale * (x A^T) B^T, to the sums: B is operand A, and scale * x
// A^T is operand B, both from global memory.
template <class Arch, class T, int MTiles>
__device__ __forceinline__ void add_lora(const MatmulArgs &args, int64_t first_n, int64_t first_m,
                                         float (&sums)[2][MTiles][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t n = first_n + threadIdx.x / 32 * kMultistageWarpN + g * 4;
#pragma unroll 1
  for (int rank = 0; rank < args.lora.rank; rank += 16) {
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = rank + t * 2 + half * 8;
        const auto element = [&](int r) {
          return n + i < args.weight.rows && r < args.lora.rank
                     ? lora_element<T>(args.lora.b, r, n + i)
                     : 0.0f;
        };
        a[i / 2][i % 2 + half * 2] = pack_pair(T{}, element(r), element(r + 1));
      }
#pragma unroll
    for (int tile = 0; tile < MTiles; ++tile) {
      const int64_t m = first_m + tile * 8 + g;
      uint32_t b[2] = {};
      if (m < args.m) {
        const T *const product =
            static_cast<const T *>(args.lora.product) + m * args.lora.product_stride + rank + t * 2;
        b[0] = *reinterpret_cast<const uint32_t *>(product);
        b[1] = *reinterpret_cast<const uint32_t *>(product + 8);
      }
#pragma unroll
      for (int f = 0; f < 2; ++f) mma_m16n8k16_on<Arch>(T{}, sums[f][tile], a[f], b[0], b[1]);
    }
  }
}

// A tile of y, or what there is of it.
template <class T>
struct YTile {
  T *y;  // its first element
  int64_t stride;
  int64_t rows;
  int64_t columns;
  const T *bias;           // starts at its first column; or NULL
  const float *row_scale;  // starts at its first row; or NULL
  bool vectors;            // four neighbours in y may be stored at once
};

// Stores y = (sums + bias) * row_scale. A lane has four neighbours of each of its rows of y.
template <class T, int MTiles>
__device__ __forceinline__ void store_y(const YTile<T> &to, const float (&sums)[2][MTiles][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int n = threadIdx.x / 32 * kMultistageWarpN + g * 4;
  float bias[4] = {};
  if (to.bias != nullptr)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (n + i < to.columns) bias[i] = to_float(to.bias[n + i]);
#pragma unroll
  for (int tile = 0; tile < MTiles; ++tile)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int m = tile * 8 + t * 2 + j;
      if (m >= to.rows) continue;
      T *const y = to.y + m * to.stride + n;
      const float scale = to.row_scale == nullptr ? 1.0f : to.row_scale[m];
      const float v[4] = {
          (sums[0][tile][j] + bias[0]) * scale, (sums[0][tile][j + 2] + bias[1]) * scale,
          (sums[1][tile][j] + bias[2]) * scale, (sums[1][tile][j + 2] + bias[3]) * scale};
      if (to.vectors && n + 4 <= to.columns) {
        *reinterpret_cast<uint2 *>(y) = {pack_pair(T{}, v[0], v[1]), pack_pair(T{}, v[2], v[3])};
        continue;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (n + i < to.columns) y[i] = from_float<T>(v[i]);
    }
}

}  // namespace
}  // namespace nf4::cuda
