// How a skinny kernel uses shared memory, which limits what it can run. No CUDA types.
#pragma once

#include <cstdint>

#include "core/formats.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// A warp tile: kWarpTileN rows of the weight by kWarpTileK columns.
constexpr int kSkinnyWarps = 16;
constexpr int kSkinnyThreads = 32 * kSkinnyWarps;
constexpr int kWarpTileK = 256;
constexpr int kWarpTileN = 16;
constexpr int kScaleK = kWarpTileK / 4;  // columns that share a scale
constexpr int kStageBytes = kWarpTileN * kWarpTileK / 2;
constexpr int64_t kSkinnyElementsMax = int64_t{1} << 30;  // a CTA's, for 32-bit offsets

constexpr int kInt4Unit = 8;  // rows of a word of zero points

// How the CTA of a skinny kernel is organized.
struct SkinnyLayout {
  int warps;
  int stages;         // stages of a warp's pipeline
  int m2_tma_stages;  // the same up to 2 rows of x where TMA copies
  int lut_bytes;
  int stage_bytes;  // in shared memory; 0 where stages are registers
  int64_t room;     // the least shared memory of a CTA, in bytes
};

// The layouts of weights with a codebook. Each has kernels of its own for x in 16 bits. The LUT of
// the second and third has half of the bytes (NarrowByteLut). The third is for Turing, which has no
// cp.async and 64 KiB.
inline constexpr SkinnyLayout kSkinnyLayouts[] = {
    {kSkinnyWarps, 2, 3, 65536, kStageBytes, 128 << 10},  // 3 stages do not fit before Hopper
    {8, 2, 2, 32768, kStageBytes, 0},
    {8, 1, 1, 32768, 0, 0},
};
constexpr int kWideSkinny = 0, kNarrowSkinny = 1, kTuringSkinny = 2;
constexpr int kSkinnyLayoutCount = sizeof kSkinnyLayouts / sizeof kSkinnyLayouts[0];

// For 16 rows of x in fp32, which take many registers.
constexpr SkinnyLayout kFp32M16Layout{8, 4, 4, 65536, kStageBytes, 0};
// The layout of integer weights, which have no LUT.
constexpr SkinnyLayout kInt4Layout{kSkinnyWarps, 2, 2, 0, kStageBytes, 0};

// Whether there are kernels of the wide layout for x in 16 bits. For 16 rows of x and 163 KiB, and
// for experts from 8 on, the narrow layout is faster: the sums of 16 warps leave room for few rows
// of the weight at a time.
constexpr bool has_wide_skinny(int max_m, bool tensor_maps, bool experts) {
  return tensor_maps || max_m < (experts ? 8 : 16);
}

// The index of the layout on a GPU, whose facts are GpuFacts, and the layout. For x in fp32 there
// is the wide one alone.
template <class Facts>
constexpr int skinny_layout_index(nf4_dtype dtype, int max_m, const Facts &gpu,
                                  bool experts = false) {
  if (dtype == NF4_DTYPE_FP32) return kWideSkinny;
  if (!gpu.tensor_cores) return kTuringSkinny;
  const bool wide = has_wide_skinny(max_m, gpu.tensor_maps, experts) &&
                    gpu.shared_bytes >= kSkinnyLayouts[kWideSkinny].room;
  return wide ? kWideSkinny : kNarrowSkinny;
}
template <class Facts>
constexpr SkinnyLayout skinny_layout(nf4_dtype dtype, int max_m, const Facts &gpu) {
  return dtype == NF4_DTYPE_FP32 && max_m == 16
             ? kFp32M16Layout
             : kSkinnyLayouts[skinny_layout_index(dtype, max_m, gpu)];
}

// Shared memory of the kernel for up to max_m rows of x, offsets in bytes: the byte LUT, each
// warp's pipeline stages, the mbarriers of the stages and of the scales; then, for each row of warp
// tiles in a group, a partial sum of each output from each warp. The scales follow.
struct SkinnySmem {
  int stages;  // stages of a warp's pipeline
  int pipeline;
  int barriers;
  int scale_barrier;
  int partials;
  int tile_partials;  // bytes of a row of warp tiles
};
constexpr SkinnySmem skinny_smem(const SkinnyLayout &layout, int max_m, bool tensor_maps) {
  SkinnySmem smem{};
  smem.stages = max_m == 2 && tensor_maps ? layout.m2_tma_stages : layout.stages;
  smem.pipeline = layout.lut_bytes;
  const int stages = layout.warps * smem.stages;
  smem.barriers = smem.pipeline + stages * layout.stage_bytes;
  smem.scale_barrier = smem.barriers + stages * 8;
  smem.partials = smem.barriers + static_cast<int>(ceil_divide(stages * 8 + 8, 512) * 512);
  smem.tile_partials = layout.warps * kWarpTileN * max_m * 4;
  return smem;
}

constexpr SkinnySmem int4_skinny_smem(int max_m) { return skinny_smem(kInt4Layout, max_m, false); }

// Copies of the 8-bit scale code in shared memory, against bank conflicts.
constexpr int kScaleCodeCopies = 4;

// Odd: the scales of 8 rows lie in different banks.
constexpr int64_t skinny_scale_pitch(int64_t k_tiles) { return k_tiles | 1; }

// Bytes of shared memory: of the scale code, and of a row of warp tiles beside partial sums. An
// item has the scales of a warp tile's row.
struct SkinnyScaleBytes {
  int64_t code;
  int64_t nested;
  int64_t items;
};
// `W` is a Weight or a WeightView.
template <class W>
constexpr int skinny_item_bytes(const W &weight) {
  if (weight.scale_bytes != ScaleBytes::kNone) return kWarpTileK >> weight.blocksize_log2;
  return weight.nested_blocksize_log2 >= 0 ? 4 : 16;
}
template <class W>
constexpr SkinnyScaleBytes skinny_scale_bytes(const W &weight) {
  const bool nested = weight.nested_blocksize_log2 >= 0;
  const int64_t items = kWarpTileN * skinny_scale_pitch(ceil_divide(weight.cols, kWarpTileK));
  const int elements_log2 = nested ? weight.blocksize_log2 + weight.nested_blocksize_log2 : 0;
  return {nested ? kScaleCodeSize * kScaleCodeCopies * 4 : 0,
          nested ? 4 * ceil_divide(kWarpTileN * weight.cols, int64_t{1} << elements_log2) : 0,
          items * skinny_item_bytes(weight)};
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
