// Which tiles a thread block makes, and the shared memory through which its warps work on them.
#pragma once

#include <cstdint>

#include "cuda/async.cuh"
#include "cuda/cluster.cuh"
#include "cuda/matmul/wide_args.hpp"

namespace nf4::cuda {
namespace {

// A tile of y and the part of its columns that this block multiplies, in slabs.
struct WidePlace {
  int row;   // of the weight, the first
  int of_x;  // its row of x, the first
  int first_slab;
  int end_slab;
};

// The place of a whole tile, or of half `half` of one.
template <class Tile>
__device__ __forceinline__ WidePlace place_of(const WideArgs &wide, int tile, int half) {
  const int rank = static_cast<int>(blockIdx.x) % wide.splits;
  const int slabs = static_cast<int>((wide.matmul.cols + kSlabColumns - 1) / kSlabColumns);
  const int group = tile / (wide.x_group * wide.row_tiles);
  const int in_group = tile - group * wide.x_group * wide.row_tiles;
  const int first_x = group * wide.x_group;
  const int x_tiles = min(wide.x_group, wide.x_tiles - first_x);
  const int row_tile = in_group / x_tiles;
  return {row_tile * Tile::kRows,
          (first_x + in_group - row_tile * x_tiles) * Tile::kColumns + half * Tile::kColumns / 2,
          slabs * rank / wide.splits, slabs * (rank + 1) / wide.splits};
}

// Call visit(place) for each whole tile of this block, and then for each half of one. All warps
// of a cluster take the same way.
template <class Tile, class Visit>
__device__ __forceinline__ void each_whole_tile(const WideArgs &wide, Visit visit) {
  for (int tile = static_cast<int>(blockIdx.x) / wide.splits; tile < wide.whole_tiles;
       tile += static_cast<int>(gridDim.x) / wide.splits)
    visit(place_of<Tile>(wide, tile, 0));
}
template <class Tile, class Visit>
__device__ __forceinline__ void each_half_tile(const WideArgs &wide, Visit visit) {
  const int halves = 2 * (wide.tiles - wide.whole_tiles);
  for (int half = static_cast<int>(blockIdx.x) / wide.splits; half < halves;
       half += static_cast<int>(gridDim.x) / wide.splits)
    visit(place_of<Tile>(wide, wide.whole_tiles + half / 2, half % 2));
}
// The same for what does not depend on a tile's width but by `whole`: visit(place, whole).
template <class Tile, class Visit>
__device__ __forceinline__ void each_tile(const WideArgs &wide, Visit visit) {
  each_whole_tile<Tile>(wide, [&](const WidePlace &place) { visit(place, true); });
  if constexpr (Tile::kHalves)
    each_half_tile<Tile>(wide, [&](const WidePlace &place) { visit(place, false); });
}

enum WideBarrier { kXFull, kXEmpty, kSlabFull, kSlabEmpty };

template <class Tile>
struct WideShared {
  using Layout = WideLayout<Tile>;
  uint8_t *base;

  __device__ __forceinline__ uint8_t *x(int slot) const {
    return base + Layout::kX + slot * Layout::kXBytes;
  }
  __device__ __forceinline__ uint8_t *slab(int slot) const {
    return base + Layout::kSlabs + slot * Layout::kSlabBytes;
  }
  // Of each row the scales of a slab's two steps, as the kernel's Weights keep them.
  __device__ __forceinline__ uint2 *scales(int slot) const {
    return reinterpret_cast<uint2 *>(base + Layout::kScales + slot * Layout::kScaleBytes);
  }
  __device__ __forceinline__ float *code() const {
    return reinterpret_cast<float *>(base + Layout::kCode);
  }
  __device__ __forceinline__ uint64_t *barrier(WideBarrier kind, int slot) const {
    return reinterpret_cast<uint64_t *>(base + Layout::kBarriers) + kind * kWideMaxSlots + slot;
  }
};

// Where in a ring a warp is.
template <int Slots>
struct RingTurn {
  int slot = 0;
  uint32_t parity = 0;  // of the phase that fills the slot
  __device__ __forceinline__ void advance() {
    if (++slot < Slots) return;
    slot = 0;
    parity ^= 1;
  }
};
template <class Tile>
using XTurn = RingTurn<WideLayout<Tile>::kXSlots>;
template <class Tile>
using SlabTurn = RingTurn<WideLayout<Tile>::kSlabSlots>;

}  // namespace
}  // namespace nf4::cuda
