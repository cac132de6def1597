// Dequantize with `out` on a 16-byte and `packed` on a 4-byte boundary: one fused kernel
// dequantizes the scales and the weights.
//
// Cost, nested, 16-bit output, blocksize 64: 0.516 bytes read and 2 written per weight, and about 5
// instructions per weight (shift, shuffle, multiply, half a conversion), so memory bounds it.
//
// A CTA has 4 or 8 tiles, one per warp, and no loop: with a persistent grid, multiprocessors drift
// apart, which widens the window of addresses in flight. A tile is 512 or 1024 elements: two or
// four loads per lane are in flight, and each warp-wide access is contiguous. The scales of the
// tile, at most 32, are computed one per lane and shared by shuffles. docs/design/dequant.md has
// the experiments.
#pragma once

#include <cuda_runtime.h>

#include "cuda/dequant/decode.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

// 4 MB of weights. On an H200, 8 MB and more were evicted before use.
constexpr int64_t kPrefetchElements = int64_t{8} << 20;

// The codes of a lane's vector in each step of a tile that lies in the tensor.
template <class Arch, class T, int Steps>
__device__ __forceinline__ void load_codes(const uint8_t *tile, CachePolicy policy,
                                           uint32_t (&codes)[Steps]) {
  const int lane = threadIdx.x % 32;
  const uint32_t *words = reinterpret_cast<const uint32_t *>(tile);
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int step = 0; step < Steps; ++step)
      codes[step] = load_once<Arch>(words + step * 32 + lane, policy);
  } else {
    // A word is two vectors of fp32. Loads of 4 bytes are faster than twice as many loads of 2
    // bytes.
    uint32_t loaded[Steps / 2];
#pragma unroll
    for (int i = 0; i < Steps / 2; ++i) loaded[i] = load_once<Arch>(words + i * 32 + lane, policy);
#pragma unroll
    for (int step = 0; step < Steps; ++step)
      codes[step] =
          __shfl_sync(kAllLanes, loaded[step / 2], step % 2 * 16 + lane / 2) >> (lane % 2 * 16);
  }
}

// The codes of one vector that lies in the tensor.
template <class Arch, class T>
__device__ __forceinline__ uint32_t load_vector_codes(const uint8_t *packed, CachePolicy policy) {
  if constexpr (sizeof(T) == 2)
    return load_once<Arch>(reinterpret_cast<const uint32_t *>(packed), policy);
  else
    return load_once<Arch>(reinterpret_cast<const uint16_t *>(packed), policy);
}

// Thread 0 prefetches the weights and scales of a CTA that starts later into L2.
template <class Arch, class Scales, int kElements>
__device__ __forceinline__ void prefetch(const DequantArgs &args) {
  if constexpr (Arch::kBulkPrefetch) {
    constexpr int64_t kCtasAhead = kPrefetchElements / kElements;
    const int64_t ahead = int64_t{blockIdx.x} + kCtasAhead;
    // The last CTA may be partial, so its data is not prefetched.
    if (!args.prefetch || threadIdx.x != 0 || ahead + 1 >= gridDim.x) return;
    prefetch_l2<Arch>(args.weight.packed + ahead * (kElements / 2), kElements / 2);
    const int scale_bytes =
        (kElements >> args.weight.blocksize_log2) * int{sizeof(typename Scales::Stored)};
    if (scale_bytes % 16 == 0)
      prefetch_l2<Arch>(static_cast<const uint8_t *>(args.weight.absmax) + ahead * scale_bytes,
                        scale_bytes);
  }
}

// Dequantizes the elements of one CTA. With `Full`, all of them are in the tensor, so nothing is
// checked. Offsets that the CTA has in common are 64-bit and computed once per warp (in the uniform
// datapath); the offsets that a thread adds to them are 32-bit.
template <class Arch, class T, class Scales, int Threads, int Tile, bool Full>
__device__ __forceinline__ void dequant_cta(const DequantArgs &args, ScaleTable<Scales> &table) {
  constexpr int kVector = kPerVector<T>;
  constexpr int kStride = 32 * kVector;  // elements that a warp processes in a step
  constexpr int kSteps = Tile / kStride;
  constexpr int kElements = Threads / 32 * Tile;

  const int64_t start = int64_t{blockIdx.x} * kElements;
  const int lane = threadIdx.x % 32;
  const int tile = threadIdx.x / 32 * Tile;
  const int first = tile + lane * kVector;
  const CachePolicy once = evict_first<Arch>();
  const auto has_vector = [&](int step) {
    return Full || start + first + step * kStride + kVector <= args.elements;
  };

  // All loads of the tile are issued before the first arithmetic.
  uint32_t words[kSteps];
  if constexpr (Full) {
    load_codes<Arch, T>(args.weight.packed + start / 2 + tile / 2, once, words);
  } else {
    const uint8_t *in = args.weight.packed + start / 2 + first / 2;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      words[step] =
          has_vector(step) ? load_vector_codes<Arch, T>(in + step * kStride / 2, once) : 0;
  }
  const int tile_blocks = max(Tile >> args.weight.blocksize_log2, 1);
  const int64_t block = (start >> args.weight.blocksize_log2) +
                        ((tile >> args.weight.blocksize_log2) + (lane & (tile_blocks - 1)));
  const auto fetched =
      Scales::template fetch<LoadNc>(args.weight, Full ? block : min(block, args.blocks - 1));
  const ShuffledCodebook codebook(args.weight);
  prefetch<Arch, Scales, kElements>(args);
  table.template load<LoadNc, Threads>(args.weight);
  if constexpr (Scales::kTableSize > 0) __syncthreads();
  const float lane_scale = Scales::finish(fetched, table);

  uint4 *out = reinterpret_cast<uint4 *>(args.out) + start / kVector + first / kVector;
  const CachePolicy output = args.keep_output ? evict_normal<Arch>() : once;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int in_tile = step * kStride + lane * kVector;
    const float scale = __shfl_sync(kAllLanes, lane_scale, in_tile >> args.weight.blocksize_log2);
    float values[kVector];
    decode<Scales::kLowNibbleFirst>(words[step], scale, codebook, values);
    if (has_vector(step))
      store_once<Arch>(out + step * 32, pack_vector<T>(values), output);
    else
      dequant_elements<T>(args, table, start + tile + in_tile, args.elements);
  }
}

// Needs out on a 16-byte and packed on a 4-byte boundary.
template <class Arch, class T, class Scales, int Threads, int Tile, int Resident>
__global__ void __launch_bounds__(Threads, resident_ctas(Resident, Threads))
    dequant_aligned(const __grid_constant__ DequantArgs args) {
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  __shared__ float entries[Scales::kTableSize > 0 ? Scales::kTableSize : 1];
  ScaleTable<Scales> table(entries);
  if ((blockIdx.x + int64_t{1}) * (Threads / 32 * Tile) <= args.elements)
    dequant_cta<Arch, T, Scales, Threads, Tile, true>(args, table);
  else
    dequant_cta<Arch, T, Scales, Threads, Tile, false>(args, table);
}

}  // namespace
}  // namespace nf4::cuda
