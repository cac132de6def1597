// Dequantize for any alignment. Vectors start at the 16-byte boundaries of out, wherever they fall
// in the weight, so a vector may start at an odd element and straddle two blocks. Its codes are
// shifted out of two words, and each weight selects one of two scales. The kernel moves the same
// bytes as aligned.cuh with more instructions per weight, and takes about a fifth longer.
// docs/design/dequant.md has the experiments.
#pragma once

#include <cuda_runtime.h>

#include "cuda/dequant/configs.hpp"
#include "cuda/dequant/decode.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

constexpr DequantTiling kUnalignedTiling = dequant_tiling(kUnaligned);

// Returns eight consecutive codes from any nibble on, the first in the highest four bits, from the
// word that contains the nibble and the next one.
template <bool LowNibbleFirst>
__device__ __forceinline__ uint32_t codes_from(const uint32_t *words, int nibble) {
  const auto load = [&](int word) {
    const uint32_t reversed = __byte_perm(__ldg(words + word), 0, 0x0123);
    if (!LowNibbleFirst) return reversed;
    return (reversed & 0x0f0f0f0fu) << 4 | (reversed >> 4 & 0x0f0f0f0fu);
  };
  return __funnelshift_l(load(nibble / 8 + 1), load(nibble / 8), nibble % 8 * 4);
}

// Dequantizes the elements of one CTA from `start` on. Nibbles count from the 4-byte boundary
// before packed. With `Full`, the tensor continues before and after them, so nothing is checked.
template <class Arch, class T, class Scales, bool Full>
__device__ __forceinline__ void dequant_unaligned_cta(const DequantArgs &args, int64_t start,
                                                      ScaleTable<Scales> &table) {
  constexpr int kVector = kPerVector<T>;
  constexpr int kStride = 32 * kVector;
  constexpr int kSteps = kUnalignedTiling.warp_tile / kStride;
  const int lane = threadIdx.x % 32;
  const int tile = threadIdx.x / 32 * kUnalignedTiling.warp_tile;
  const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(args.weight.packed) % 4);
  const int64_t start_nibble = 2 * misaligned + start;
  const uint32_t *words =
      reinterpret_cast<const uint32_t *>(args.weight.packed - misaligned) + (start_nibble >> 3);
  // Only bytes of packed are read, so both words must lie in it.
  const auto is_whole = [&](int64_t i) {
    const int64_t first_word = (2 * misaligned + i) & ~int64_t{7};
    return i >= 0 && i + kVector <= args.elements && first_word >= 2 * misaligned &&
           first_word + 16 <= 2 * misaligned + (args.elements + 1) / 2 * 2;
  };

  uint32_t codes[kSteps];
  bool whole[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int in_cta = tile + step * kStride + lane * kVector;
    whole[step] = Full || is_whole(start + in_cta);
    codes[step] = whole[step] ? codes_from<Scales::kLowNibbleFirst>(
                                    words, static_cast<int>(start_nibble & 7) + in_cta)
                              : 0;
  }
  // A tile is in at most 17 quantization blocks, one lane for each; in 33 blocks of 16.
  const int mask = (1 << args.weight.blocksize_log2) - 1;
  const int start_in_block = static_cast<int>(start) & mask;
  const int tile_block = (start_in_block + tile) >> args.weight.blocksize_log2;
  const int64_t block = (start >> args.weight.blocksize_log2) + tile_block;
  const auto fetch = [&](int in_tile) {
    return Scales::template fetch<LoadNc>(args.weight,
                                          max(min(block + in_tile, args.blocks - 1), int64_t{0}));
  };
  const auto fetched = fetch(lane);
  const ShuffledCodebook codebook(args.weight);
  table.template load<LoadNc, kUnalignedTiling.threads>(args.weight);
  if constexpr (Scales::kTableSize > 0) __syncthreads();
  const float lane_scale = Scales::finish(fetched, table);

  const auto scale_of = [&](int in_tile) {
    const float scale = __shfl_sync(kAllLanes, lane_scale, in_tile);
    return in_tile < 32 ? scale : Scales::finish(fetch(in_tile), table);
  };
  const CachePolicy output = args.keep_output ? evict_normal<Arch>() : evict_first<Arch>();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int in_cta = tile + step * kStride + lane * kVector;
    const int element = start_in_block + in_cta;
    const int in_tile = (element >> args.weight.blocksize_log2) - tile_block;
    const float scale = scale_of(in_tile);
    const float next_scale = scale_of(in_tile + 1);
    const int left = mask + 1 - (element & mask);  // elements of the first scale
    float values[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      values[k] = multiply_rn(codebook[codes[step] >> (28 - 4 * k)], k < left ? scale : next_scale);
    const int64_t i = start + in_cta;
    if (whole[step])
      store_once<Arch>(reinterpret_cast<uint4 *>(static_cast<T *>(args.out) + i),
                       pack_vector<T>(values), output);
    else
      dequant_elements<T>(args, table, max(i, int64_t{0}), min(i + kVector, args.elements));
  }
}

template <class Arch, class T, class Scales>
__global__ void __launch_bounds__(kUnalignedTiling.threads, resident_ctas(kUnalignedTiling.resident,
                                                                          kUnalignedTiling.threads))
    dequant_unaligned(const __grid_constant__ DequantArgs args) {
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  __shared__ float entries[Scales::kTableSize > 0 ? Scales::kTableSize : 1];
  ScaleTable<Scales> table(entries);
  const int64_t start = int64_t{blockIdx.x} * kUnalignedTiling.cta_tile() - args.shift;
  if (start >= 8 && start + kUnalignedTiling.cta_tile() + 16 <= args.elements)
    dequant_unaligned_cta<Arch, T, Scales, true>(args, start, table);
  else
    dequant_unaligned_cta<Arch, T, Scales, false>(args, start, table);
}

}  // namespace
}  // namespace nf4::cuda
