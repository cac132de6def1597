// How a skinny kernel uses shared memory, which limits what it can run. No CUDA types.
#pragma once

#include <cstdint>

#include "core/formats.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// A warp tile: kWarpTileN rows of the weight by kWarpTileK columns.
constexpr int kSkinnyWarps = 16;
constexpr int kSkinnyThreads = 32 * kSkinnyWarps;
constexpr int kFp32M16Warps = 8;  // of 16 rows of x in fp32, which take many registers
constexpr int kWarpTileK = 256;
constexpr int kWarpTileN = 16;
constexpr int kScaleK = kWarpTileK / 4;  // columns that share a scale
constexpr int kStageBytes = kWarpTileN * kWarpTileK / 2;
constexpr int64_t kSkinnyElementsMax = int64_t{1} << 30;  // of a CTA, for 32-bit offsets

constexpr int kInt4Unit = 8;  // rows of a word of zero points

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
constexpr SkinnySmem skinny_smem(int max_m, int stages, int pipeline, int warps = kSkinnyWarps) {
  SkinnySmem smem{};
  smem.stages = stages;
  smem.pipeline = pipeline;
  smem.barriers = smem.pipeline + warps * smem.stages * kStageBytes;
  smem.scale_barrier = smem.barriers + warps * smem.stages * 8;
  smem.partials =
      smem.barriers + static_cast<int>(ceil_divide(warps * smem.stages * 8 + 8, 512) * 512);
  smem.tile_partials = warps * kWarpTileN * max_m * 4;
  return smem;
}

constexpr SkinnySmem skinny_smem(int max_m, bool tensor_maps) {
  // Three stages do not fit before Hopper.
  return skinny_smem(max_m, max_m == 2 && tensor_maps ? 3 : 2, 65536);
}

// The same of fewer warps.
constexpr SkinnySmem fp32_m16_smem() { return skinny_smem(16, 4, 65536, kFp32M16Warps); }

constexpr int skinny_warps(nf4_dtype dtype, int max_m) {
  return dtype == NF4_DTYPE_FP32 && max_m == 16 ? kFp32M16Warps : kSkinnyWarps;
}
constexpr SkinnySmem skinny_smem_of(nf4_dtype dtype, int max_m, bool tensor_maps) {
  return skinny_warps(dtype, max_m) == kSkinnyWarps ? skinny_smem(max_m, tensor_maps)
                                                    : fp32_m16_smem();
}

// The same of integer weights, without a LUT.
constexpr SkinnySmem int4_skinny_smem(int max_m) { return skinny_smem(max_m, 2, 0); }

// Copies of the 8-bit scale code in shared memory, against bank conflicts.
constexpr int kScaleCodeCopies = 4;

// Odd: the scales of 8 rows lie in different banks.
constexpr int64_t skinny_scale_pitch(int64_t k_tiles) { return k_tiles | 1; }

// Bytes of shared memory: of the scale code, and of a row of warp tiles beside partial sums.
struct SkinnyScaleBytes {
  int64_t code;
  int64_t nested;
  int64_t items;
};
constexpr SkinnyScaleBytes skinny_scale_bytes(int64_t cols, bool nested, int elements_log2) {
  const int64_t k_tiles = ceil_divide(cols, kWarpTileK);
  return {nested ? kScaleCodeSize * kScaleCodeCopies * 4 : 0,
          nested ? 4 * ceil_divide(kWarpTileN * cols, int64_t{1} << elements_log2) : 0,
          kWarpTileN * skinny_scale_pitch(k_tiles) * (nested ? 4 : 16)};
}

// Rows between the scales of a group and those of the next where they are [group][row]: an odd
// number of 32 bytes, so that those of four groups lie in different banks.
constexpr int64_t int4_skinny_scale_pitch(int64_t rows) {
  return (ceil_divide(rows, kWarpTileN) | 1) * kWarpTileN;
}

// Bytes of shared memory of scales and zero points of integer weights.
constexpr int64_t int4_skinny_scale_bytes(int64_t rows, int64_t groups) {
  return groups * (int4_skinny_scale_pitch(rows) * 5 / 2);
}

// Rows of warp tiles in a group whose sums and scales fit; 0 if not even one does.
constexpr int64_t skinny_tiles_that_fit(const SkinnySmem &smem, const SkinnyScaleBytes &scales,
                                        int64_t shared_bytes) {
  // One entry of nested_absmax more than the tiles' own, and the alignment.
  constexpr int64_t kSlack = 4 + 16;
  const int64_t bytes = shared_bytes - smem.partials - scales.code - kSlack;
  return bytes / (smem.tile_partials + scales.nested + scales.items);
}

constexpr int64_t int4_skinny_tiles_that_fit(const SkinnySmem &smem, int64_t groups,
                                             int64_t shared_bytes) {
  // The pitch is at most kWarpTileN rows more.
  const int64_t two_rows = groups * 5;
  return (shared_bytes - smem.partials - kWarpTileN * two_rows / 2) /
         (smem.tile_partials + kWarpTileN * two_rows / 2);
}

}  // namespace nf4::cuda
