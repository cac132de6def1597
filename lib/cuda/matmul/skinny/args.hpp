// What a skinny kernel gets. No device code: launches are ordinary C++.
#pragma once

#include <cstdint>

#include "core/formats.hpp"
#include "cuda/lora/cta_args.hpp"
#include "cuda/matmul/args.hpp"
#include "cuda/matmul/skinny/smem.hpp"
#include "cuda/runtime/fast_divide.hpp"
#include "cuda/runtime/tensor_map.hpp"

namespace nf4::cuda {

template <class Arch, int kMaxM, int kWarps>
constexpr SkinnySmem kSkinnySmem =
    kWarps == kSkinnyWarps ? skinny_smem(kMaxM, Arch::kTensorMaps) : fp32_m16_smem();

// The warps of a CTA, by what multiplies a warp tile.
template <class WarpMma>
constexpr int kWarpsOf = kSkinnyWarps;

// How the CTAs and their warps share the work.
struct SkinnyWork {
  // Units of rows of a CTA; the first `big_ctas` CTAs have one more.
  int cta_units;
  int big_ctas;
  int prefetch_bytes;  // of a CTA's rows, prefetched into L2 at once
  int k_tiles;         // warp tiles in a row of them
  // The warps are k_warps along K by n_warps along N: a warp takes every n_warps-th row of tiles.
  int k_warps;
  int n_warps;
  int group_tiles;  // rows of warp tiles whose partial sums and scales fit in shared memory
  FastDivisor k_tiles_divisor;
  FastDivisor k_warps_divisor;
};

struct SkinnyArgs {
  MatmulArgs matmul;
  LoraCtaArgs lora;
  TensorMap packed;  // rows of bytes
  // In x's dtype; sums are multiplied by its unit. Unused with a caller's codebook, which is in
  // device memory.
  RoundedCodebook codebook;
  SkinnyWork work;
  // Offsets in shared memory.
  int smem_scale_code;
  int smem_nested_absmax;
  int smem_scales;
  int smem_lora;
  int scale_pitch;  // items from a row's scales to the next row's
  // n_warps rows of tiles on: items of scales, and elements.
  int item_step;
  int element_step;
  bool whole_items;  // the scales of a warp tile's row lie side by side, aligned
  // As many items on as a CTA has threads: rows, and warp tiles along K.
  int row_step;
  int k_tile_step;
};

struct Int4SkinnyArgs {
  Int4MatmulArgs matmul;
  TensorMap packed;
  SkinnyWork work;
  int unit_rows;  // of a unit of a CTA's rows
  // Offsets in shared memory.
  int smem_scales;
  int smem_zeros;
  int scale_pitch;  // [group][row]: rows from a group's scales to the next group's
};

// Several weights, between which the CTAs are divided.
constexpr int kSkinnyBatchMax = 4;
struct SkinnyBatch {
  SkinnyArgs problems[kSkinnyBatchMax];
  int first_cta[kSkinnyBatchMax];  // INT_MAX where there is no weight
};

}  // namespace nf4::cuda
