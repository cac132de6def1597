// Tiles of the weight on their way to shared memory: each warp has a ring of slots of its own,
// so no warp waits for another.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/matmul/few_args.hpp"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace nf4::cuda {
namespace {

// A tile in shared memory: 16 rows of 128 bytes, whose pieces of 16 bytes are exchanged by the
// row's number, as a tensor map's 128-byte swizzle does, so that the rows' pieces of one
// column are in different banks.
class TileSlot {
 public:
  __device__ __forceinline__ explicit TileSlot(uint8_t *bytes) : bytes_(bytes) {}
  static __device__ __forceinline__ uint32_t offset(int row, int piece) {
    return row * (kSlice / 2) + (piece ^ row % 8) * 16;
  }
  __device__ __forceinline__ uint8_t *address(int row, int piece) const {
    return bytes_ + offset(row, piece);
  }
  __device__ __forceinline__ uint4 piece(uint32_t offset) const {
    return *reinterpret_cast<const uint4 *>(bytes_ + offset);
  }
  __device__ __forceinline__ uint2 half_piece(int row, int index, int half) const {
    return *reinterpret_cast<const uint2 *>(address(row, index) + half * 8);
  }

 private:
  uint8_t *bytes_;
};

// The tiles that a warp takes, in its order: of each group of tiles, of each of its slices,
// every tile_step-th tile.
class TileWalk {
 public:
  __device__ __forceinline__ TileWalk(const FewArgs &few, int tiles, int first_tile,
                                      int first_slice)
      : few_(few),
        // Beyond the tiles of a group there is none for this warp.
        tiles_(first_tile < few.group_tiles ? tiles : 0),
        first_slice_(first_slice),
        first_tile_(first_tile),
        tile_(first_tile_),
        slice_(first_slice_),
        group_end_(min(few.group_tiles, tiles)) {
    if (tile_ >= group_end_) next_slice();
  }
  __device__ __forceinline__ bool done() const { return tile_ >= tiles_; }
  __device__ __forceinline__ int tile() const { return tile_; }
  __device__ __forceinline__ int slice() const { return slice_; }
  __device__ __forceinline__ void advance() {
    tile_ += few_.tile_step;
    if (tile_ >= group_end_) next_slice();
  }

 private:
  __device__ __forceinline__ void next_slice() {
    slice_ += kFewWarps;
    if (slice_ >= few_.slices) {
      slice_ = first_slice_;
      group_ = group_end_;
      group_end_ = min(group_end_ + few_.group_tiles, tiles_);
    }
    tile_ = group_ + first_tile_;
  }

  const FewArgs &few_;
  int tiles_, first_slice_, first_tile_, tile_, slice_;
  int group_ = 0;
  int group_end_;
};

// Where a warp's tiles are, and which of them comes next into which slot.
template <class Arch, int kMaxM>
class TileSlots {
 public:
  static constexpr int kSlots = kFewLayout<Arch, kMaxM>.slots;

  __device__ __forceinline__ TileSlots(uint8_t *shared, int warp)
      : slots_(shared + kFewLayout<Arch, kMaxM>.ring + warp * kSlots * kTileBytes) {}
  __device__ __forceinline__ uint8_t *to_fill() const { return slots_ + fill_ * kTileBytes; }
  __device__ __forceinline__ TileSlot to_read() const {
    return TileSlot(slots_ + read_ * kTileBytes);
  }
  __device__ __forceinline__ int fill_slot() const { return fill_; }
  __device__ __forceinline__ int read_slot() const { return read_; }
  __device__ __forceinline__ void filled() { fill_ = fill_ == kSlots - 1 ? 0 : fill_ + 1; }
  // True where the ring begins anew.
  __device__ __forceinline__ bool read() {
    read_ = read_ == kSlots - 1 ? 0 : read_ + 1;
    return read_ == 0;
  }

 private:
  uint8_t *const slots_;
  int fill_ = 0;
  int read_ = 0;
};

// Copies are boxes of a tensor map, which one lane asks for.
template <class Arch, int kMaxM>
class BoxRing {
 public:
  __device__ __forceinline__ BoxRing(const FewArgs &few, uint8_t *shared, int warp, int first_row,
                                     TileWalk walk)
      : few_(few),
        walk_(walk),
        first_row_(first_row),
        slots_(shared, warp),
        barriers_(reinterpret_cast<uint64_t *>(shared + kFewLayout<Arch, kMaxM>.barriers) +
                  warp * TileSlots<Arch, kMaxM>::kSlots) {}

  // Before all else, by all lanes.
  __device__ __forceinline__ void init() {
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < TileSlots<Arch, kMaxM>::kSlots; ++i) mbarrier_init(barriers_ + i);
      fence_mbarrier_init();
    }
    __syncwarp();
  }

  // Asks for the next tile, if there is one, in the slot that was read first. All lanes call it
  // when they have read it.
  __device__ __forceinline__ void fill() {
    if (walk_.done()) return;
    if (threadIdx.x % 32 == 0) {
      uint64_t *const barrier = barriers_ + slots_.fill_slot();
      mbarrier_arrive_expect_tx(barrier, kTileBytes);
      tma_load_2d(slots_.to_fill(), &few_.packed, walk_.slice() * (kSlice / 2),
                  first_row_ + walk_.tile() * kTileRows, barrier);
    }
    slots_.filled();
    walk_.advance();
  }

  __device__ __forceinline__ TileSlot next() {
    mbarrier_wait_parity(barriers_ + slots_.read_slot(), parity_);
    const TileSlot tile = slots_.to_read();
    if (slots_.read()) parity_ ^= 1;
    return tile;
  }

 private:
  const FewArgs &few_;
  TileWalk walk_;
  int first_row_;
  TileSlots<Arch, kMaxM> slots_;
  uint64_t *const barriers_;
  uint32_t parity_ = 0;
};

// Every lane copies pieces of 16 bytes.
template <class Arch, int kMaxM>
class PieceRing {
 public:
  __device__ __forceinline__ PieceRing(const FewArgs &few, uint8_t *shared, int warp, int first_row,
                                       TileWalk walk)
      : few_(few), walk_(walk), first_row_(first_row), slots_(shared, warp) {}

  __device__ __forceinline__ void init() {}

  __device__ __forceinline__ void fill() {
    if (!walk_.done()) {
      copy_tile();
      slots_.filled();
      walk_.advance();
    }
    cp_async_commit();  // also where there is nothing more, as next counts them
  }

  __device__ __forceinline__ TileSlot next() {
    cp_async_wait<TileSlots<Arch, kMaxM>::kSlots - 1>();
    __syncwarp();  // for the other lanes' pieces
    const TileSlot tile = slots_.to_read();
    slots_.read();
    return tile;
  }

 private:
  __device__ __forceinline__ void copy_tile() const {
    constexpr int kRowPieces = kSlice / 2 / 16, kPieces = kTileBytes / 16;
    const TileSlot to(slots_.to_fill());
    const int64_t row_bytes = few_.matmul.cols / 2;
#pragma unroll
    for (int i = 0; i < kPieces; i += 32) {
      const int row = (i + threadIdx.x % 32) / kRowPieces, piece = threadIdx.x % kRowPieces;
      const int64_t of_rows = first_row_ + walk_.tile() * kTileRows + row;
      const int64_t column = walk_.slice() * (kSlice / 2) + piece * 16;
      const bool there = of_rows < few_.matmul.rows && column < row_bytes;
      cp_async_16(to.address(row, piece),
                  few_.matmul.packed + (there ? of_rows * row_bytes + column : 0), there ? 16 : 0);
    }
  }

  const FewArgs &few_;
  TileWalk walk_;
  int first_row_;
  TileSlots<Arch, kMaxM> slots_;
};

template <class Arch, int kMaxM>
using TileRing =
    std::conditional_t<Arch::kTensorMaps, BoxRing<Arch, kMaxM>, PieceRing<Arch, kMaxM>>;

}  // namespace
}  // namespace nf4::cuda
