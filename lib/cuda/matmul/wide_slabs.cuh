// What a warp that multiplies reads from the rings: the weight's bytes and scales by slabs, x by
// steps.
#pragma once

#include <cstdint>

#include "cuda/matmul/wide_walk.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace nf4::cuda {
namespace {

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x % 32); }
// Of the threads that multiply.
__device__ __forceinline__ int multiplier_index() { return static_cast<int>(threadIdx.x) - 128; }
// The first of this lane's two rows of the tile, which are 8 apart.
__device__ __forceinline__ int first_row() {
  return multiplier_index() / 32 * 16 + lane_index() / 4;
}

template <class Tile>
class SlabReader {
 public:
  __device__ __forceinline__ explicit SlabReader(WideShared<Tile> shared)
      : shared_(shared), piece_(first_row() * kPitch + first_row() / 2 % 4 * 16) {}

  // Waits for the slab; the bytes of its first step are on their way then.
  __device__ __forceinline__ void start() {
    mbarrier_wait_parity(shared_.barrier(kSlabFull, turn_.slot), turn_.parity);
    load_words<0>();
  }

  // The bytes of a step of the slab: each row's 32, of which a lane uses every fourth.
  template <int Step>
  __device__ __forceinline__ void load_words() {
    const uint8_t *const rows = shared_.slab(turn_.slot);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int piece = 0; piece < 2; ++piece)
        words_[half][piece] = *reinterpret_cast<const uint4 *>(
            rows + (piece_ ^ (Step * 2 + piece) * 16) + half * 8 * kPitch);
  }

  // The slab may be written again, once the whole warp has its scales and bytes.
  __device__ __forceinline__ void release() {
    mbarrier_arrive_warp(shared_.barrier(kSlabEmpty, turn_.slot));
    turn_.advance();
  }

  // Of a step of the slab, the scales of this lane's rows.
  template <int Step>
  __device__ __forceinline__ float2 scales() const {
    const auto *const scales =
        reinterpret_cast<const float *>(shared_.scales(turn_.slot) + piece_ / kPitch) + Step;
    return {scales[0], scales[8 * 2]};
  }

  // The A operands of a step's four products, of weights that of_byte(word, half) makes from this
  // lane's byte of a word of row `half`.
  template <class OfByte>
  __device__ __forceinline__ void decode(uint32_t (&a)[4][4], OfByte of_byte) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
        const uint4 words = words_[half][piece];
        a[piece * 2][half] = of_byte(words.x, half);
        a[piece * 2][half + 2] = of_byte(words.y, half);
        a[piece * 2 + 1][half] = of_byte(words.z, half);
        a[piece * 2 + 1][half + 2] = of_byte(words.w, half);
      }
  }

 private:
  static constexpr int kPitch = kSlabColumns / 2;
  static_assert(kPitch == 64 && WideLayout<Tile>::kSlabs % kPitch == 0);

  const WideShared<Tile> shared_;
  const int piece_;  // this lane's first of a slab; of others one bit or two differ
  SlabTurn<Tile> turn_;
  uint4 words_[2][2];  // [row][piece]
};

template <class Tile>
class XReader {
 public:
  __device__ __forceinline__ explicit XReader(WideShared<Tile> shared) : shared_(shared) {}

  // Waits for the next step, and tells where it is.
  __device__ __forceinline__ uint64_t next() {
    mbarrier_wait_parity(shared_.barrier(kXFull, turn_.slot), turn_.parity);
    return wgmma_descriptor(shared_.x(turn_.slot));
  }
  // The products that read it are done.
  __device__ __forceinline__ void done() {
    release(turn_.slot);
    turn_.advance();
  }
  // The products that read it are under way, and those of the step before it are done.
  __device__ __forceinline__ void hold() {
    release_held();
    held_ = turn_.slot;
    turn_.advance();
  }
  __device__ __forceinline__ void release_held() {
    if (held_ != kNone) release(held_);
    held_ = kNone;
  }

 private:
  static constexpr int kNone = -1;

  __device__ __forceinline__ void release(int slot) const {
    mbarrier_arrive_warp(shared_.barrier(kXEmpty, slot));
  }

  const WideShared<Tile> shared_;
  XTurn<Tile> turn_;
  int held_ = kNone;  // the slot that products under way read
};

}  // namespace
}  // namespace nf4::cuda
