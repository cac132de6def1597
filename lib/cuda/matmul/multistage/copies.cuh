// The copies of K-tiles into the stages of a multistage kernel: by cp.async, and before Ampere
// through registers.
#pragma once

#include <cstdint>

#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/ptx/cp_async.cuh"

namespace nf4::cuda {
namespace {

// A thread's copies of one operand's K-tiles: a chunk of 16 bytes in each kRowStep-th row. Rows
// past the last one are zeros.
template <class Arch, int Rows, int RowChunks>
class TileCopies {
  static constexpr int kRowStep = kMultistageThreads / RowChunks;
  static constexpr bool kIdle = Rows < kRowStep;  // some threads have no row

 public:
  static constexpr int kPieces = (Rows + kRowStep - 1) / kRowStep;
  // The K-tiles that registers hold, beyond those in the stages.
  static constexpr int kHeld = Arch::kTensorCores ? 0 : 1;

  static __device__ __forceinline__ int row() { return threadIdx.x / RowChunks; }
  static __device__ __forceinline__ int chunk() { return threadIdx.x % RowChunks; }

  // `from` is the first chunk of the first row, of `rows` in the matrix; `to` is this thread's
  // place in a stage.
  __device__ __forceinline__ TileCopies(const void *from, int64_t row_bytes, int64_t rows, int to)
      : from_(static_cast<const uint8_t *>(from) + chunk() * 16),
        step_bytes_(row_bytes * kRowStep),
        to_(to) {
    const int left = static_cast<int>(min(rows, int64_t{Rows})) - row();
    pieces_ = left <= 0 ? 0 : (left + kRowStep - 1) / kRowStep;
    // An only row may have any stride, and others no address of their own.
    if (left > 0) from_ += row() * row_bytes;
  }

  // Starts to copy a piece of the next K-tile; if not `more`, there is none. With registers, the
  // piece that they hold goes to the stage, and they get that of the K-tile after it.
  template <int StagePieceBytes>
  __device__ __forceinline__ void copy(int piece, uint8_t *stage, bool more) {
    if (kIdle && row() >= Rows) return;
    uint8_t *const to = stage + to_ + piece * StagePieceBytes;
    const uint8_t *const from = from_ + piece * step_bytes_;
    const bool exists = more && piece < pieces_;
    if constexpr (kHeld == 0) {
      cp_async_16(to, from, exists ? 16 : 0);
    } else {
      *reinterpret_cast<uint4 *>(to) = held_[piece];
      hold(piece, exists);
    }
  }
  __device__ __forceinline__ void advance() { from_ += RowChunks * 16; }

  // Comes before the first copy. With registers, starts to load the first K-tile.
  __device__ __forceinline__ void begin() {
    if constexpr (kHeld > 0) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) hold(piece, piece < pieces_);
      advance();
    }
  }

 private:
  __device__ __forceinline__ void hold(int piece, bool exists) {
    held_[piece] = uint4{};
    if (exists) held_[piece] = *reinterpret_cast<const uint4 *>(from_ + piece * step_bytes_);
  }

  const uint8_t *from_;
  const int64_t step_bytes_;
  int pieces_;  // that exist
  const int to_;
  uint4 held_[kHeld == 0 ? 1 : kPieces];
};

}  // namespace
}  // namespace nf4::cuda
