// p = x A^T. The first CTAs of a skinny kernel's grid (lora CTAs) compute it for the others (weight
// CTAs), which add p B^T to their outputs. It needs no launch of its own, so the start of the
// kernel overlaps with its predecessor's end, and p is computed while the weight is multiplied.
//
// Lora CTAs share the columns and, in chunks, the ranks. They write fp32 sums to the workspace, and
// a flag for each weight CTA, which waits for its own flags and clears them. CTAs start in order,
// so a weight CTA only waits for CTAs that have started.
//
// This is for x in 16 bits, with rows of x and A that load as vectors. Otherwise lora_product
// computes p first.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cuda/atomic>

#include "cuda/element.cuh"
#include "cuda/lora/cta_args.hpp"
#include "cuda/lora/term.cuh"
#include "cuda/lora/tile.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

using LoraFlag = ::cuda::atomic_ref<uint64_t, ::cuda::thread_scope_device>;

// A part of the columns, 32 per step, times a chunk of ranks.
struct LoraPart {
  int first_rank, begin, end;
  float *to;  // [m][stride]

  __device__ __forceinline__ LoraPart(const LoraCtaArgs &args, int part, int first_rank)
      : first_rank(first_rank) {
    const int64_t steps = (args.cols + 31) / 32;
    begin = static_cast<int>(steps * part / kLoraParts);
    end = static_cast<int>(steps * (part + 1) / kLoraParts);
    to = args.parts + part * args.m * args.stride;
  }
};

// Multiplies with mma.sync; `shared` holds the warps' sums.
template <class T, class F, int kWarps>
__device__ __forceinline__ void multiply_tile(const LoraCtaArgs &args, const LoraPart &part,
                                              float *shared) {
  using Tile = LoraTile<1, kLoraCtaRanks / 8>;
  static_assert(Tile::kM == kLoraCtaM);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Tile tile;
#pragma unroll 1
  for (int step = part.begin + warp; step < part.end; step += Tile::kDepth * kWarps) {
    typename Tile::Fragments fragments[Tile::kDepth];
#pragma unroll
    for (int i = 0; i < Tile::kDepth; ++i)
      Tile::template load<T, F, false>(args, 0, part.first_rank, step + i * kWarps, part.end,
                                       fragments[i]);
#pragma unroll
    for (int i = 0; i < Tile::kDepth; ++i) tile.template add<T>(fragments[i]);
  }
#pragma unroll
  for (int i = 0; i < Tile::kSums; ++i) shared[(warp * Tile::kSums + i) * 32 + lane] = tile.sum(i);
  __syncthreads();
#pragma unroll 1
  for (int output = threadIdx.x; output < Tile::kOutputs; output += 32 * kWarps) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += shared[i * Tile::kOutputs + output];
    const int m = Tile::row(output);
    const int r = part.first_rank + Tile::template rank<RanksInOrder>(output);
    if (m < args.m && r < args.stride) part.to[m * args.stride + r] = sum;
  }
}

// The whole work of lora CTA `cta`. `shared` has room for the sums of a tile of each warp.
template <class Arch, class T, int kWarps>
__device__ __forceinline__ void multiply_lora(const LoraCtaArgs &args, int cta, float *shared) {
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  const int step = args.ctas / kLoraParts * kLoraCtaRanks;
#pragma unroll 1
  for (int r = cta / kLoraParts * kLoraCtaRanks; r < args.rank; r += step) {
    const LoraPart part(args, cta % kLoraParts, r);
    if (args.in.is_fp32)
      multiply_tile<T, float, kWarps>(args, part, shared);
    else
      multiply_tile<T, T, kWarps>(args, part, shared);
    __syncthreads();
  }
  const int weight_ctas = static_cast<int>(gridDim.x) - args.ctas;
  for (int i = threadIdx.x; i < weight_ctas; i += 32 * kWarps)
    LoraFlag(args.flags[i * args.ctas + cta]).store(args.signature, ::cuda::memory_order_release);
}

// Called by one warp of weight CTA `cta`. `to` is [m][stride + kLoraPadding]: the product times the
// scale, as numbers of T.
template <class T>
__device__ __forceinline__ void receive_lora(const LoraCtaArgs &args, int cta, float *to) {
  const int lane = threadIdx.x % 32;
  if (lane < args.ctas) {
    const LoraFlag flag(args.flags[cta * args.ctas + lane]);
    while (flag.load(::cuda::memory_order_acquire) != args.signature) {
    }
    flag.store(0, ::cuda::memory_order_relaxed);  // for the next launch with these arguments
  }
  __syncwarp();
  const int numbers = static_cast<int>(args.m) * args.stride;
#pragma unroll 2
  for (int i = lane * 4; i < numbers; i += 128) {
    float4 parts[kLoraParts];
#pragma unroll
    for (int j = 0; j < kLoraParts; ++j)
      parts[j] = __ldcg(reinterpret_cast<const float4 *>(args.parts + j * numbers + i));
    float sums[4] = {};
#pragma unroll
    for (const float4 &part : parts) {
      sums[0] += part.x;
      sums[1] += part.y;
      sums[2] += part.z;
      sums[3] += part.w;
    }
    const int m = i / args.stride, r = i - m * args.stride;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      to[m * (args.stride + kLoraPadding) + r + j] = to_float(from_float<T>(sums[j] * args.scale));
      if (cta == 0 && args.product != nullptr && r + j < args.rank)
        static_cast<T *>(args.product)[m * args.rank + r + j] = from_float<T>(sums[j]);
    }
  }
}

// The same if lora_product, the predecessor, has computed the product.
template <class Arch, class T>
__device__ __forceinline__ void load_lora(const LoraCtaArgs &args, float *to) {
  pdl_wait<Arch>();
  const int numbers = static_cast<int>(args.m) * args.stride;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < numbers; i += 32) {
    const int m = i / args.stride;
    to[m * (args.stride + kLoraPadding) + i - m * args.stride] =
        to_float(static_cast<const T *>(args.scaled)[i]);
  }
}

}  // namespace
}  // namespace nf4::cuda
