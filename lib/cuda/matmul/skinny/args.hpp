// What a skinny kernel gets, and how it uses shared memory. No device code: launches are ordinary
// C++.
#pragma once

#include <cstdint>

#include "core/formats.hpp"
#include "cuda/matmul/args.hpp"
#include "cuda/matmul/configs.hpp"
#include "cuda/runtime/fast_divide.hpp"
#include "cuda/runtime/tensor_map.hpp"

namespace nf4::cuda {

// A warp tile: kWarpTileN rows of the weight by kWarpTileK columns.
constexpr int kSkinnyWarps = 16;
constexpr int kSkinnyThreads = 32 * kSkinnyWarps;
constexpr int kWarpTileK = 256;
constexpr int kWarpTileN = 16;
constexpr int kScaleK = kWarpTileK / 4;  // columns that share a scale
constexpr int kStageBytes = kWarpTileN * kWarpTileK / 2;
constexpr int64_t kSkinnyElementsMax = int64_t{1} << 30;  // of a CTA, for 32-bit offsets

// Shared memory of the kernel for up to max_m rows of x, offsets in bytes: the byte LUT, each
// warp's pipeline stages, the mbarriers of the stages and of the scales; then, for each row of warp
// tiles in a group, a partial sum of each output from each warp. The scales follow.
struct SkinnySmem {
  int stages;  // of a warp's pipeline
  int pipeline;
  int barriers;
  int scale_barrier;
  int partials;
  int tile_partials;  // bytes of a row of warp tiles
};
constexpr SkinnySmem skinny_smem(int max_m, bool tensor_maps) {
  SkinnySmem smem{};
  // Three do not fit before Hopper.
  smem.stages = max_m == 2 && tensor_maps ? 3 : 2;
  smem.pipeline = 65536;
  smem.barriers = smem.pipeline + kSkinnyWarps * smem.stages * kStageBytes;
  smem.scale_barrier = smem.barriers + kSkinnyWarps * smem.stages * 8;
  smem.partials = smem.barriers + 512;
  smem.tile_partials = kSkinnyWarps * kWarpTileN * max_m * 4;
  return smem;
}
template <class Arch, int kMaxM>
constexpr SkinnySmem kSkinnySmem = skinny_smem(kMaxM, Arch::kTensorMaps);

// Copies of the 8-bit scale code in shared memory, against bank conflicts.
constexpr int kScaleCodeCopies = 4;

struct SkinnyArgs {
  MatmulArgs matmul;
  TensorMap packed;  // rows of bytes
  // In x's dtype; sums are multiplied by its unit. Unused with a caller's codebook, which is in
  // device memory.
  RoundedCodebook codebook;
  // Rows of a CTA; the first `big_ctas` CTAs have one more.
  int cta_rows;
  int big_ctas;
  int prefetch_bytes;  // of them, prefetched into L2 at once
  int k_tiles;         // warp tiles in a row of them
  // The warps are k_warps along K by n_warps along N: a warp takes every n_warps-th row of tiles.
  int k_warps;
  int n_warps;
  int group_tiles;  // rows of warp tiles whose partial sums and scales fit in shared memory
  FastDivisor k_tiles_divisor;
  FastDivisor k_warps_divisor;
  // Offsets in shared memory.
  int smem_scale_code;
  int smem_nested_absmax;
  int smem_scales;
  int scale_pitch;  // items from a row's scales to the next row's
  // n_warps rows of tiles on: items of scales, and elements.
  int item_step;
  int element_step;
  bool whole_items;  // the scales of a warp tile's row lie side by side, aligned
  // kSkinnyThreads items on: rows, and warp tiles along K.
  int row_step;
  int k_tile_step;
};

// Several weights, between which the CTAs are divided.
constexpr int kSkinnyBatchMax = 4;
struct SkinnyBatch {
  SkinnyArgs problems[kSkinnyBatchMax];
  int first_cta[kSkinnyBatchMax];  // INT_MAX where there is no weight
};

}  // namespace nf4::cuda
