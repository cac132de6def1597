// What a matmul kernel gets, and how a family of them is described. No device code, so that
// the selection is ordinary C++.
#pragma once

#include <cstdint>

#include "core/macros.hpp"
#include "cuda/family.hpp"
#include "cuda/tensor_map.hpp"
#include "nf4/nf4.h"

namespace nf4::cuda {

struct MatmulArgs {
  const uint8_t *packed;
  const void *absmax;  // float if flat, uint8_t if nested
  const float *nested_absmax;
  const float *nested_code;
  const float *nested_offset;
  const float *codebook;  // NULL: the format's own
  const void *x;
  const void *bias;  // or NULL
  void *y;
  int64_t m;
  int64_t rows;
  int64_t cols;
  int64_t x_stride;
  int64_t y_stride;
  nf4_format format;
  int blocksize_log2;
  int nested_blocksize_log2;
  // Of the few-row kernels: a thread block's rows, of which the first `more_rows` blocks have
  // one more; warps that have the slices of a tile; each takes every tile_step-th tile; tiles
  // whose partial sums shared memory holds at a time.
  int64_t block_rows;
  int more_rows;
  int together;
  int tile_step;
  int group_tiles;
  bool x_vectors;   // rows of x are on 16-byte boundaries
  bool whole_runs;  // cols is a multiple of 32, and packed is on a 16-byte boundary
};

// Which of a family's kernels: for any problem; or, in thread blocks that own rows of the
// weight, for up to 2, 8 and 16 rows of x. On Hopper also in tiles of so many rows of x, which
// are no family's (wide.hpp).
enum MatmulShape {
  kTiled,
  kFew2,
  kFew8,
  kFew16,
  kWide32Tall,
  kWide64Tall,
  kWide64,
  kWide128,
  kWide152,
  kWide176,
  kWide208,
  kWide256
};
constexpr int kMatmulShapes = 4;

// The tiles of kTiled.
constexpr int kTiledRows = 64;  // of the weight
constexpr int kTiledM = 64;     // of x
constexpr int kTiledThreads = 256;

// The few-row kernels: a warp multiplies slices of kSlice columns of tiles of kTileRows rows.
constexpr int kFewWarps = 16;
constexpr int kFewThreads = 32 * kFewWarps;
constexpr int kSlice = 256;
constexpr int kTileRows = 16;
constexpr int kQuarter = kSlice / 4;                // columns that lie in one block
constexpr int64_t kFewElements = int64_t{1} << 30;  // of a group of tiles, for 32-bit offsets

constexpr int few_max_m(MatmulShape shape) { return shape == kFew2 ? 2 : shape == kFew8 ? 8 : 16; }

// Shared memory of the few-row kernels: the table of pairs, each warp's ring of tiles, its
// barriers, the 8-bit code of the scales, and a partial sum of each output of a tile from
// each warp.
constexpr int kFewSlots = 3;
constexpr int kTileBytes = kTileRows * kSlice / 2;
constexpr int kFewRingOffset = 65536;
constexpr int kFewBarrierOffset = kFewRingOffset + kFewWarps * kFewSlots * kTileBytes;
constexpr int kFewCodeOffset = kFewBarrierOffset + 1024;
constexpr int kFewFixedBytes = kFewCodeOffset + 1024;
constexpr int few_tile_bytes(MatmulShape shape) {
  return kFewWarps * kTileRows * few_max_m(shape) * 4;
}

struct FewArgs {
  MatmulArgs matmul;
  TensorMap packed;  // rows of bytes
};

struct MatmulFamily {
  Family family;
  // [fp16, bf16][nested][shape]: MatmulArgs; NULL: the family has none
  const void *kernels[2][2][kMatmulShapes];
};

extern const MatmulFamily kMatmulSm90;
extern const MatmulFamily kMatmulSm80;
extern const MatmulFamily kMatmulSm75;

}  // namespace nf4::cuda
