// Dequantize of integer weights whose groups are multiples of 64 columns, in order. `out` is on a
// 16-byte boundary, and the weight is aligned as the layout's loads need (can_align in
// int4_choose.hpp).
//
// Cost, 16-bit output, groups of 128: 0.516 bytes read and 2 written per weight, and about 5
// instructions (shift, mask, subtract, multiply, half a conversion), so memory bounds it.
//
// A CTA has a tile (int4_tiles.cuh) and no loop. docs/design/dequant.md has the experiments.
#pragma once

#include <cuda_runtime.h>

#include "cuda/dequant/int4_tiles.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T, class Tile>
__global__ void __launch_bounds__(Tile::kTiling.threads, resident_ctas(2048, Tile::kTiling.threads))
    dequant_int4_aligned(const __grid_constant__ Int4DequantArgs args) {
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  constexpr int kVector = kPerVector<T>;
  const CachePolicy once = evict_first<Arch>();
  const CachePolicy output = args.keep_output ? evict_normal<Arch>() : once;
  const Tile tile(args, once);
  T *const out = static_cast<T *>(args.out) + threadIdx.x % Tile::kLanes * kVector;
#pragma unroll
  for (int half = 0; half < 8 / kVector; ++half) {
    const auto words = tile.template words<kVector>(half);
#pragma unroll
    for (int row = 0; row < Tile::kRows; ++row) {
      const ScaleAndZero scale = tile.scale(args.weight, row);
      float values[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = scale.value(words.code(row, i));
      if (tile.has(row))
        store_once<Arch>(reinterpret_cast<uint4 *>(out + tile.out(args.weight, row) +
                                                   half * Tile::kLanes * kVector),
                         pack_vector<T>(values), output);
    }
  }
}

}  // namespace
}  // namespace nf4::cuda
