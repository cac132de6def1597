// Which tiles a thread block makes, and the shared memory through which its warps work on them.
#pragma once

#include <cstdint>

#include "cuda/async.cuh"
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

// Of this block's cluster in the grid.
__device__ __forceinline__ int cluster_index(const WideArgs &wide) {
  return static_cast<int>(blockIdx.x * wide.inverse_splits >> kInverseShift);
}

// The place of a whole tile, or of half `half` of one.
template <class Tile>
__device__ __forceinline__ WidePlace place_of(const WideArgs &wide, int tile, int half) {
  const int rank = static_cast<int>(blockIdx.x) - cluster_index(wide) * wide.splits;
  const int first_slab = rank * wide.block_slabs + min(rank, wide.more_slabs);
  const int end_slab = first_slab + wide.block_slabs + (rank < wide.more_slabs);
  int row_tile = tile, x_tile = 0;
  if (wide.x_tiles > 1) {  // divisions take long
    const int group = tile / (wide.x_group * wide.row_tiles);
    const int in_group = tile - group * wide.x_group * wide.row_tiles;
    const int first_x = group * wide.x_group;
    const int x_tiles = min(wide.x_group, wide.x_tiles - first_x);
    row_tile = in_group / x_tiles;
    x_tile = first_x + in_group - row_tile * x_tiles;
  }
  return {row_tile * Tile::kRows, x_tile * Tile::kColumns + half * Tile::kColumns / 2, first_slab,
          end_slab};
}

// Call visit(place) for each whole tile of this block, and then for each half of one. All warps
// of a cluster take the same way.
template <class Tile, class Visit>
__device__ __forceinline__ void each_whole_tile(const WideArgs &wide, Visit visit) {
  for (int tile = cluster_index(wide); tile < wide.whole_tiles; tile += wide.clusters)
    visit(place_of<Tile>(wide, tile, 0));
}
template <class Tile, class Visit>
__device__ __forceinline__ void each_half_tile(const WideArgs &wide, Visit visit) {
  const int halves = 2 * (wide.tiles - wide.whole_tiles);
  for (int half = cluster_index(wide); half < halves; half += wide.clusters)
    visit(place_of<Tile>(wide, wide.whole_tiles + half / 2, half % 2));
}
// The same for what does not depend on a tile's width but by `whole`: visit(place, whole).
template <class Tile, class Visit>
__device__ __forceinline__ void each_tile(const WideArgs &wide, Visit visit) {
  each_whole_tile<Tile>(wide, [&](const WidePlace &place) { visit(place, true); });
  if constexpr (Tile::kHalves)
    each_half_tile<Tile>(wide, [&](const WidePlace &place) { visit(place, false); });
}

enum WideBarrier { kXFull, kXEmpty, kSlabFull, kSlabEmpty, kBarrierKinds };

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
  // Of each row the scales of a slab's two steps.
  __device__ __forceinline__ float2 *scales(int slot) const {
    return reinterpret_cast<float2 *>(base + Layout::kScales + slot * Layout::kScaleBytes);
  }
  __device__ __forceinline__ float *code() const {
    return reinterpret_cast<float *>(base + Layout::kCode);
  }
  __device__ __forceinline__ uint64_t *barrier(WideBarrier kind, int slot) const {
    return reinterpret_cast<uint64_t *>(base + Layout::kBarriers) + kind * kWideMaxSlots + slot;
  }
  // Of one phase, which ends when the first scales are there.
  __device__ __forceinline__ uint64_t *first_scales() const { return barrier(kBarrierKinds, 0); }
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
