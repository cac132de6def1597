// What the kernels for many rows of x get, and where they keep it in shared memory.
#pragma once

#include <cstdint>

#include "core/formats.hpp"
#include "core/rounding.hpp"
#include "cuda/matmul/args.hpp"
#include "cuda/matmul/few_args.hpp"
#include "cuda/runtime/tensor_map.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// A thread block's tile of y: kColumns rows of x by 64 rows of the weight for each of its
// consumer warpgroups. All blocks share some tiles if Streamed.
template <int Columns, int Warpgroups, bool Streamed = false>
struct WideTile {
  static constexpr int kColumns = Columns;
  static constexpr int kWarpgroups = Warpgroups;
  static constexpr int kRows = 64 * Warpgroups;
  using Sums = float[Columns / 2];  // of a thread
  // Each step's sums are multiplied by the scale, not the weights: a multiplication of each sum
  // takes more than one of each weight where there are many rows of x, and as many registers more.
  static constexpr bool kScaledSums = Columns <= 64;
  static constexpr bool kStreamed = Streamed;
  // In which x comes: a copy has 256 rows at most.
  static constexpr int kBoxes = Columns > 256 ? 2 : 1;
  // The workspace is for these.
  static_assert(!Streamed ||
                (kRows == MatmulWorkspace::kTileRows && MatmulWorkspace::has_columns(Columns) &&
                 4 * Warpgroups <= MatmulWorkspace::kFlags));
};

constexpr int kStepColumns = 64;                // of x and the weight that are multiplied at once
constexpr int kSlabColumns = 2 * kStepColumns;  // of the weight that come together
static_assert(kSlabColumns == MatmulWorkspace::kSlabColumns);
constexpr int kWideSharedBytes = 227 * 1024;  // what Hopper has
constexpr int kWideMaxSlots = 8;
constexpr int kMaxSplits = 8;  // blocks that any GPU allows in a cluster

// Shared memory: the table of pairs; rings of x, of slabs of the weight, and of their scales;
// each consumer warp's piece of y; the 8-bit code of the scales; barriers. Partial sums of
// blocks that share a tile lie over the table and the rings, at the end.
template <class Tile>
struct WideLayout {
  static constexpr int kXBox = Tile::kColumns / Tile::kBoxes;
  static constexpr int kXBytes = Tile::kColumns * kStepColumns * 2;
  static constexpr int kSlabBytes = Tile::kRows * kSlabColumns / 2;
  static constexpr int kScaleBytes = Tile::kRows * 2 * 4;  // of a slab: two steps' of each row
  static constexpr int kPieceBytes = 1024;
  static constexpr int kPiecesBytes = Tile::kWarpgroups * 4 * kPieceBytes;
  static constexpr int kTableBytes = 65536;
  static constexpr int kBarriersBytes = (4 * kWideMaxSlots + 1) * 8;
  static constexpr int kEndBytes = kPiecesBytes + 1024 + kBarriersBytes;

  // Wide tiles take long for a slab, and leave little room.
  static constexpr int kSlabSlots = Tile::kColumns > 192   ? 2
                                    : Tile::kColumns > 128 ? 3
                                    : Tile::kRows == 128   ? 6
                                                           : 5;
  static constexpr int kRoomForX =
      kWideSharedBytes - kTableBytes - kEndBytes - kSlabSlots * (kSlabBytes + kScaleBytes);
  static constexpr int kXSlots =
      kRoomForX / kXBytes < kWideMaxSlots ? kRoomForX / kXBytes : kWideMaxSlots;
  static_assert(kXSlots >= 3);

  static constexpr int kX = kTableBytes;
  static constexpr int kSlabs = kX + kXSlots * kXBytes;
  static constexpr int kScales = kSlabs + kSlabSlots * kSlabBytes;
  static constexpr int kPieces = kScales + kSlabSlots * kScaleBytes;
  static constexpr int kCode = kPieces + kPiecesBytes;
  static constexpr int kBarriers = kCode + 1024;
  static constexpr int kBytes = kBarriers + kBarriersBytes;
  static_assert(kBytes <= kWideSharedBytes);
  // Partial sums, of shares that are whole columns of 8.
  static_assert((kXBytes / 1024 + kMaxSplits - 1) * 128 * Tile::kWarpgroups * 16 <= kPieces);
  static_assert(kXBytes % 1024 == 0 && kSlabBytes % 512 == 0);
};

struct WideArgs {
  MatmulArgs matmul;
  TensorMap packed;               // slabs
  TensorMap x;                    // steps
  float codebook[kCodebookSize];  // the format's own
  RoundedCodebook rounded;        // that in fp16, or in x's dtype where sums are scaled
  // A cluster of `splits` blocks makes a tile, each from its part of the columns: block_slabs of
  // them, and one more in the first more_slabs blocks. Each takes every `clusters`th tile.
  int tiles;
  int row_tiles;
  int x_tiles;
  int x_group;  // of them are multiplied with a row tile before the next one is
  int splits;
  int clusters;
  uint32_t inverse_splits;  // for fewer than 1024 blocks
  int block_slabs;
  int more_slabs;
  // Of streamed kernels, in which clusters are single blocks: all of them share the first tiles, as
  // many as the last turns of whole ones would have. Their slabs lie one tile's after the other's;
  // a block has stream_slabs of them, and one more if it is of the first more_streams.
  int streamed_tiles;
  int slabs;  // of a tile
  int stream_slabs;
  int more_streams;
  uint64_t *flags;     // of each block and warp: the signature if its partial sums are there
  uint64_t signature;  // this launch's own
  float4 *partials;    // the partial sums that blocks leave for others, in a slot each
  bool scale_groups;   // scales may be loaded several steps at once (wide_producers.cuh)
  bool y_vectors;      // rows of y are on 16-byte boundaries
};

}  // namespace nf4::cuda
