// Tiles of the weight on their way to shared memory: each warp has a ring of slots of its own,
// so no warp waits for another.
#pragma once

#include <cstdint>

#include "cuda/async.cuh"
#include "cuda/matmul/args.hpp"

namespace nf4::cuda {
namespace {

// A tile in shared memory: 16 rows of 128 bytes, whose pieces of 16 bytes are exchanged by the
// row's number, as a tensor map's 128-byte swizzle does, so that the rows' pieces of one
// column are in different banks.
class TileSlot {
 public:
  __device__ __forceinline__ explicit TileSlot(uint8_t *bytes) : bytes_(bytes) {}
  __device__ __forceinline__ uint8_t *address(int row, int piece) const {
    return bytes_ + row * (kSlice / 2) + (piece ^ row % 8) * 16;
  }
  __device__ __forceinline__ uint4 piece(int row, int index) const {
    return *reinterpret_cast<const uint4 *>(address(row, index));
  }
  __device__ __forceinline__ uint2 half_piece(int row, int index, int half) const {
    return *reinterpret_cast<const uint2 *>(address(row, index) + half * 8);
  }

 private:
  uint8_t *bytes_;
};

// The copies are boxes of a tensor map, which one lane asks for.
template <class Arch>
class TileRing {
 public:
  __device__ __forceinline__ TileRing(const FewArgs &args, uint8_t *shared) : map_(&args.packed) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    slots_ = shared + kFewRingOffset + warp * kFewSlots * kTileBytes;
    barriers_ = reinterpret_cast<uint64_t *>(shared + kFewBarrierOffset) + warp * kFewSlots;
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < kFewSlots; ++i) init_barrier(barriers_ + i);
      fence_barrier_init();
    }
    __syncwarp();
  }

  __device__ __forceinline__ void start(int64_t first_row, int64_t slice) {
    first_row_ = static_cast<int>(first_row);
    column_ = static_cast<int>(slice * (kSlice / 2));
  }

  __device__ __forceinline__ void fill(int slot, int tile) {
    if (threadIdx.x % 32 != 0) return;
    expect_bytes(barriers_ + slot, kTileBytes);
    copy_box(slots_ + slot * kTileBytes, map_, column_, first_row_ + tile * kTileRows,
             barriers_ + slot);
  }
  __device__ __forceinline__ void skip() {}

  __device__ __forceinline__ TileSlot wait(int slot) {
    wait_for_phase(barriers_ + slot, parities_ >> slot & 1u);
    parities_ ^= 1u << slot;
    return TileSlot(slots_ + slot * kTileBytes);
  }

 private:
  const void *map_;
  uint8_t *slots_;
  uint64_t *barriers_;
  int first_row_;
  int column_;
  uint32_t parities_ = 0;
};

}  // namespace
}  // namespace nf4::cuda
