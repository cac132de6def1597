// Which tiles a thread block makes, and the shared memory through which its warps work on them.
#pragma once

#include <cstdint>

#include "cuda/matmul/wide_args.hpp"
#include "cuda/ptx/mbarrier.cuh"

namespace nf4::cuda {
namespace {

// A tile of y and the part of its columns that this block multiplies, in slabs.
struct WidePlace {
  int row;   // of the weight, the first
  int of_x;  // its row of x, the first
  int first_slab;
  int end_slab;
  bool writes;      // y; or leaves its sums to the block that does
  int first_block;  // this one and those before it, from first_block on, have a part of the tile
};

// Of this block's cluster in the grid.
__device__ __forceinline__ int cluster_index(const WideArgs &wide) {
  return static_cast<int>(blockIdx.x * wide.inverse_splits >> kInverseShift);
}

// Where the slabs of a block begin among those of the streamed tiles.
__device__ __forceinline__ int stream_first(const WideArgs &wide, int block) {
  return block * wide.stream_slabs + min(block, wide.more_streams);
}
// The block that has a slab of them.
__device__ __forceinline__ int stream_block(const WideArgs &wide, int slab) {
  const int more = wide.more_streams * (wide.stream_slabs + 1);
  return slab < more ? slab / (wide.stream_slabs + 1)
                     : wide.more_streams + (slab - more) / wide.stream_slabs;
}

// This block's places, one after the other: first those in streamed tiles, from the last to the
// first, since of the last one another block has the end, and may wait for the sums. Blocks wait
// for those before them alone, and leave their own sums before they wait: where the GPU has no room
// for all of them at a time none waits for ever, as long as the GPU starts them in their order. All
// warps of a cluster take the same way.
template <class Tile>
class WideWalk {
 public:
  __device__ __forceinline__ explicit WideWalk(const WideArgs &wide) : wide_(wide) {}

  __device__ __forceinline__ bool more() const {
    return turn_ < streamed_places() || whole_tile() < wide_.tiles;
  }

  __device__ __forceinline__ WidePlace place() const {
    return turn_ < streamed_places() ? streamed_place() : whole_place();
  }

  __device__ __forceinline__ void advance() { ++turn_; }

 private:
  __device__ __forceinline__ int block() const { return static_cast<int>(blockIdx.x); }

  __device__ __forceinline__ int streamed_places() const {
    if (!Tile::kStreamed) return 0;
    return last_streamed() - stream_first(wide_, block()) / wide_.slabs + 1;
  }
  __device__ __forceinline__ int last_streamed() const {
    return (stream_first(wide_, block() + 1) - 1) / wide_.slabs;
  }

  __device__ __forceinline__ WidePlace streamed_place() const {
    const int tile = last_streamed() - turn_, first = tile * wide_.slabs;
    WidePlace place = of_tile(tile);
    place.first_slab = max(stream_first(wide_, block()) - first, 0);
    place.end_slab = min(stream_first(wide_, block() + 1) - first, wide_.slabs);
    place.writes = place.end_slab == wide_.slabs;
    if (place.writes && place.first_slab > 0) place.first_block = stream_block(wide_, first);
    return place;
  }

  __device__ __forceinline__ int whole_tile() const {
    return wide_.streamed_tiles + cluster_index(wide_) +
           (turn_ - streamed_places()) * wide_.clusters;
  }
  __device__ __forceinline__ WidePlace whole_place() const {
    WidePlace place = of_tile(whole_tile());
    const int rank = block() - cluster_index(wide_) * wide_.splits;
    place.first_slab = rank * wide_.block_slabs + min(rank, wide_.more_slabs);
    place.end_slab = place.first_slab + wide_.block_slabs + (rank < wide_.more_slabs);
    return place;
  }

  __device__ __forceinline__ WidePlace of_tile(int tile) const {
    int row_tile = tile, x_tile = 0;
    if (wide_.x_tiles > 1) {  // divisions take long
      const int group = tile / (wide_.x_group * wide_.row_tiles);
      const int in_group = tile - group * wide_.x_group * wide_.row_tiles;
      const int first_x = group * wide_.x_group;
      const int x_tiles = min(wide_.x_group, wide_.x_tiles - first_x);
      row_tile = in_group / x_tiles;
      x_tile = first_x + in_group - row_tile * x_tiles;
    }
    return {row_tile * Tile::kRows, x_tile * Tile::kColumns, 0, 0, true, block()};
  }

  const WideArgs &wide_;
  int turn_ = 0;
};

// Calls visit(place) for each.
template <class Tile, class Visit>
__device__ __forceinline__ void each_place(const WideArgs &wide, Visit visit) {
  for (WideWalk<Tile> walk(wide); walk.more(); walk.advance()) visit(walk.place());
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
