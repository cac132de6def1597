// p = x A^T by the first CTAs of a skinny kernel's grid, for its other CTAs (consumers), which add
// p B^T to their outputs. No launch of its own, so that the start of the kernel overlaps with its
// predecessor's end, and p is made while the consumers multiply the weight.
//
// Producers share the columns and, in chunks, the ranks. They write fp32 sums to the workspace, and
// a flag for each consumer, which waits for its own flags and clears them. CTAs start in order, so
// a consumer waits for CTAs that have started.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cuda/atomic>

#include "cuda/element.cuh"
#include "cuda/lora/producer_args.hpp"
#include "cuda/lora/term.cuh"
#include "cuda/lora/tile.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

using LoraFlag = ::cuda::atomic_ref<uint64_t, ::cuda::thread_scope_device>;

// A producer's share of a chunk of ranks: 32 columns a step.
struct LoraShare {
  int first_rank, begin, end;
  float *to;  // the part of the columns: [m][stride]

  __device__ __forceinline__ LoraShare(const LoraProducerArgs &args, int part, int first_rank)
      : first_rank(first_rank) {
    const int64_t steps = (args.cols + 31) / 32;
    begin = static_cast<int>(steps * part / kLoraParts);
    end = static_cast<int>(steps * (part + 1) / kLoraParts);
    to = args.parts + part * args.m * args.stride;
  }
};

// By mma.sync; `shared` holds the warps' sums.
template <class T, class F, int kWarps>
__device__ __forceinline__ void multiply_tile(const LoraProducerArgs &args, const LoraShare &share,
                                              float *shared) {
  using Tile = LoraTile<1, kLoraProducerRanks / 8>;
  static_assert(Tile::kM == kMaxLoraProducerM);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Tile tile;
#pragma unroll 1
  for (int step = share.begin + warp; step < share.end; step += Tile::kDepth * kWarps) {
    typename Tile::Fragments fragments[Tile::kDepth];
#pragma unroll
    for (int i = 0; i < Tile::kDepth; ++i)
      Tile::template load<T, F, false>(args, 0, share.first_rank, step + i * kWarps, share.end,
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
    const int m = Tile::row(output),
              r = share.first_rank + Tile::template rank<RanksInOrder>(output);
    if (m < args.m && r < args.stride) share.to[m * args.stride + r] = sum;
  }
}

// A warp an output, of any dtype and alignment.
template <class T, int kWarps>
__device__ __forceinline__ void multiply_any(const LoraProducerArgs &args, const LoraShare &share) {
  const int lane = threadIdx.x % 32,
            end = static_cast<int>(min(args.cols, int64_t{share.end} * 32));
  const int outputs = static_cast<int>(args.m) * kLoraProducerRanks;
#pragma unroll 1
  for (int output = threadIdx.x / 32; output < outputs; output += kWarps) {
    const int m = output / kLoraProducerRanks;
    const int r = share.first_rank + output % kLoraProducerRanks;
    const T *const x = static_cast<const T *>(args.x) + m * args.x_stride;
    float sum = 0;
    if (r < args.rank)
#pragma unroll 1
      for (int k = share.begin * 32 + lane; k < end; k += 32)
        sum = __fmaf_rn(to_float(x[k]), lora_element<T>(args.in, r, k), sum);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane == 0 && r < args.stride) share.to[m * args.stride + r] = sum;
  }
}

// All of a producer. `shared` has room for a tile's sums of each warp.
template <class Arch, class T, int kWarps>
__device__ __forceinline__ void produce_lora(const LoraProducerArgs &args, int producer,
                                             float *shared) {
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  const int step = args.ctas / kLoraParts * kLoraProducerRanks;
#pragma unroll 1
  for (int r = producer / kLoraParts * kLoraProducerRanks; r < args.rank; r += step) {
    const LoraShare share(args, producer % kLoraParts, r);
    if constexpr (sizeof(T) == 2) {
      if (args.vectors && args.in.is_fp32)
        multiply_tile<T, float, kWarps>(args, share, shared);
      else if (args.vectors)
        multiply_tile<T, T, kWarps>(args, share, shared);
      else
        multiply_any<T, kWarps>(args, share);
    } else {
      multiply_any<T, kWarps>(args, share);
    }
    __syncthreads();
  }
  const int consumers = static_cast<int>(gridDim.x) - args.ctas;
  for (int i = threadIdx.x; i < consumers; i += 32 * kWarps)
    LoraFlag(args.flags[i * args.ctas + producer])
        .store(args.signature, ::cuda::memory_order_release);
}

// By one warp of a consumer: `to` is [m][stride + kLoraPadding], the product times the scale, as
// numbers of T.
template <class T>
__device__ __forceinline__ void receive_lora(const LoraProducerArgs &args, int consumer,
                                             float *to) {
  const int lane = threadIdx.x % 32;
  if (lane < args.ctas) {
    const LoraFlag flag(args.flags[consumer * args.ctas + lane]);
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
      if (consumer == 0 && args.product != nullptr && r + j < args.rank)
        static_cast<T *>(args.product)[m * args.rank + r + j] = from_float<T>(sums[j]);
    }
  }
}

}  // namespace
}  // namespace nf4::cuda
