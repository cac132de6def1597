// The partial sums of CTAs in the workspace, and their flags.
#pragma once

#include <cstdint>
#include <cuda/atomic>

#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/matmul/workspace.hpp"

namespace nf4::cuda {
namespace {

__device__ __forceinline__ void add(float (&sums)[4], const float4 &other) {
  sums[0] += other.x;
  sums[1] += other.y;
  sums[2] += other.z;
  sums[3] += other.w;
}

// Each CTA has room for the sums of a tile, as its threads hold them.
template <class Args, int MTiles>
class StreamKPartials {
  using Sums = float[2][MTiles][4];

 public:
  using Flag = ::cuda::atomic_ref<uint64_t, ::cuda::thread_scope_device>;

  __device__ __forceinline__ explicit StreamKPartials(const Args &args) : args_(args) {}

  // Stores this CTA's sums of m_tiles times 8 rows of x. A barrier must follow, before a thread
  // releases them to other CTAs.
  __device__ __forceinline__ void store(const Sums &sums, int m_tiles) const {
    float4 *const to = of(static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x / 32));
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        const float (&sum)[4] = sums[f][m];
        if (m < m_tiles) __stcg(to + place(f, m), float4{sum[0], sum[1], sum[2], sum[3]});
      }
  }

  // Loads this lane's part of the sums of a warp of a CTA.
  __device__ __forceinline__ float4 load(int cta, int warp, int f, int m) const {
    return __ldcg(of(cta, warp) + place(f, m));
  }

  __device__ __forceinline__ Flag flag(int cta) const {
    return Flag(args_.flags[cta * MatmulWorkspace::kFlags]);
  }

 private:
  static __device__ __forceinline__ int place(int f, int m) {
    return (f * MTiles + m) * kMultistageThreads;
  }
  __device__ __forceinline__ float4 *of(int cta, int warp) const {
    return reinterpret_cast<float4 *>(args_.partials) +
           int64_t{cta} * (2 * MTiles * kMultistageThreads) + warp * 32 + threadIdx.x % 32;
  }

  const Args &args_;
};

}  // namespace
}  // namespace nf4::cuda
