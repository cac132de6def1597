// The arguments of a skinny kernel. No device code: launches are ordinary C++.
#pragma once

#include <cstdint>

#include "core/formats.hpp"
#include "cuda/lora/cta_args.hpp"
#include "cuda/matmul/args.hpp"
#include "cuda/matmul/skinny/smem.hpp"
#include "cuda/runtime/fast_divide.hpp"
#include "cuda/runtime/tensor_map.hpp"

namespace nf4::cuda {

// The layout of a CTA, by what multiplies a warp tile; of integers, all but the LUT.
template <class WarpMma>
constexpr SkinnyLayout kLayoutOf = kSkinnyLayouts[kWideSkinny];
template <class WarpMma>
constexpr int kWarpsOf = kLayoutOf<WarpMma>.warps;

// How the CTAs and their warps share the work.
struct SkinnyWork {
  // A CTA has cta_units units of rows; the first big_ctas CTAs have one more.
  int cta_units;
  int big_ctas;
  int prefetch_bytes;  // bytes of a CTA's rows that are prefetched into L2 at once
  int k_tiles;         // warp tiles in a row of them
  // There are k_warps warps along K by n_warps along N. A warp takes every n_warps-th row of tiles.
  int k_warps;
  int n_warps;
  int group_tiles;  // rows of warp tiles whose partial sums and scales fit in shared memory
  WideDivisor k_tiles_divisor;
  FastDivisor k_warps_divisor;
};

struct SkinnyArgs {
  MatmulArgs matmul;
  LoraCtaArgs lora;
  TensorMap packed;  // rows of bytes
  // Entries in x's dtype; the sums are multiplied by its unit. A caller's codebook is read from
  // device memory instead.
  RoundedCodebook codebook;
  SkinnyWork work;
  // Offsets in shared memory.
  int smem_scale_code;
  int smem_nested_absmax;
  int smem_scales;
  int smem_lora;
  int scale_pitch;  // items from a row's scales to the next row's
  // The distance of n_warps rows of tiles, in items of scales and in elements.
  int item_step;
  int element_step;
  bool whole_items;  // the scales of a warp tile's row lie side by side, aligned
  // The distance of as many items as a CTA has threads, in rows and in warp tiles along K.
  int row_step;
  int k_tile_step;
};

struct Int4SkinnyArgs {
  Int4MatmulArgs matmul;
  TensorMap packed;
  SkinnyWork work;
  int unit_rows;  // rows of the weight in a unit
  // Offsets in shared memory.
  int smem_scales;
  int smem_zeros;
  int scale_pitch;  // [group][row]: rows from a group's scales to the next group's
};

// Several weights, among which the CTAs are divided.
constexpr int kSkinnyBatchMax = 4;
struct SkinnyBatch {
  SkinnyArgs problems[kSkinnyBatchMax];
  int first_cta[kSkinnyBatchMax];  // INT_MAX where there is no weight
};

}  // namespace nf4::cuda
