// Dequantize of integer weights whose groups are multiples of 64 columns, in order: out on a
// 16-byte boundary, and what the layout's loads need (int4_dequant.cpp: is_aligned).
//
// Cost, 16-bit output, groups of 128: 0.516 bytes read and 2 written per weight, and about 5
// instructions (shift, mask, subtract, multiply, half a conversion), so memory bounds it.
//
// A warp has a tile (int4_tiles.cuh), a CTA 8 tiles and no loop. Every store of 8 lanes is a whole
// 128-byte line of out. docs/design/dequant.md has the experiments.
#pragma once

#include <cuda_runtime.h>

#include "cuda/dequant/int4_tiles.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T, class Tile>
__global__ void __launch_bounds__(kInt4DequantThreads)
    dequant_int4_aligned(const __grid_constant__ Int4DequantArgs args) {
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  constexpr int kVector = kPerVector<T>;
  const uint32_t index = blockIdx.x * (kInt4DequantThreads / 32) + threadIdx.x / 32;
  if (index >= args.warps) return;
  const CachePolicy once = evict_first<Arch>();
  const CachePolicy output = args.keep_output ? evict_normal<Arch>() : once;
  const Tile tile(args, index, once);
  T *const out = static_cast<T *>(args.out) + threadIdx.x % 8 * kVector;
#pragma unroll
  for (int half = 0; half < 8 / kVector; ++half) {
    auto words = tile.words;
    if constexpr (kVector == 4) words = tile.words.half(half);
#pragma unroll
    for (int strip = 0; strip < Tile::kStrips; ++strip) {
      const ScaleAndZero scale = tile.scale(args.weight, strip);
      float values[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = scale.value(words.code(strip, i));
      if (tile.has(strip))
        store_once<Arch>(
            reinterpret_cast<uint4 *>(out + tile.out(args.weight, strip) + half * 8 * kVector),
            pack_vector<T>(values), output);
    }
  }
}

}  // namespace
}  // namespace nf4::cuda
