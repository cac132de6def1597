// What a few-row kernel gets, and how it uses shared memory. No device code, so that the launch
// is ordinary C++.
#pragma once

#include <cstdint>

#include "core/rounding.hpp"
#include "cuda/matmul/args.hpp"
#include "cuda/runtime/tensor_map.hpp"

namespace nf4::cuda {

// A warp multiplies slices of kSlice columns of tiles of kTileRows rows of the weight.
constexpr int kFewWarps = 16;
constexpr int kFewThreads = 32 * kFewWarps;
constexpr int kSlice = 256;
constexpr int kTileRows = 16;
constexpr int kQuarter = kSlice / 4;  // columns that lie in one block
constexpr int kTileBytes = kTileRows * kSlice / 2;
constexpr int64_t kFewElements = int64_t{1} << 30;  // of a thread block, for 32-bit offsets

constexpr int few_max_m(MatmulShape shape) { return shape == kFew2 ? 2 : shape == kFew8 ? 8 : 16; }

// Shared memory of the kernel for up to max_m rows of x, offsets in bytes: the table of pairs,
// each warp's ring of tiles, the barriers of the rings and of the scales; then, for each tile of a
// group, a partial sum of each output from each warp. What the scales take comes after that.
struct FewLayout {
  int slots;  // of a ring
  int ring;
  int barriers;
  int scale_barrier;
  int partials;
  int tile_partials;  // bytes of a tile's
};
constexpr FewLayout few_layout(int max_m, bool tensor_maps) {
  FewLayout layout{};
  // Three do not fit before Hopper.
  layout.slots = max_m == 2 && tensor_maps ? 3 : 2;
  layout.ring = 65536;
  layout.barriers = layout.ring + kFewWarps * layout.slots * kTileBytes;
  layout.scale_barrier = layout.barriers + kFewWarps * layout.slots * 8;
  layout.partials = layout.barriers + 512;
  layout.tile_partials = kFewWarps * kTileRows * max_m * 4;
  return layout;
}
template <class Arch, int kMaxM>
constexpr FewLayout kFewLayout = few_layout(kMaxM, Arch::kTensorMaps);

// The 8-bit code of the scales is there so often, for fewer bank conflicts.
constexpr int kScaleCodeCopies = 4;

struct FewArgs {
  MatmulArgs matmul;
  TensorMap packed;  // rows of bytes
  // In x's dtype; a sum of products is to be multiplied by its unit. With a caller's codebook, in
  // the device's memory, unused.
  RoundedCodebook codebook;
  // A thread block's rows, of which the first `more_rows` blocks have one more.
  int block_rows;
  int more_rows;
  int prefetch_bytes;  // of them, which L2 is asked for at once
  int slices;
  int together;     // warps that have the slices of a tile
  int tile_step;    // of the tiles that such warps take
  int group_tiles;  // whose partial sums and scales shared memory holds at a time
  uint32_t inverse_slices;
  uint32_t inverse_together;
  // Offsets in shared memory.
  int shared_code;
  int shared_nested;
  int shared_scales;
  int scale_pitch;  // items from a row's scales to the next row's
  // tile_step tiles on: so many items of scales, and elements.
  int item_step;
  int element_step;
  bool whole_items;  // the scales of a slice of a row lie side by side, aligned
  // kFewThreads items on: so many rows and slices.
  int row_step;
  int slice_step;
};

// Several weights, between which the thread blocks are divided.
constexpr int kFewBatch = 4;
struct FewBatch {
  FewArgs of[kFewBatch];
  int first_block[kFewBatch];  // where there is no weight, beyond all blocks
};

}  // namespace nf4::cuda
