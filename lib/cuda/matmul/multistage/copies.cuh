// The copies of K-tiles into the stages of a multistage kernel: by cp.async, and before Ampere
// through registers.
#pragma once

#include <cstdint>

#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/ptx/cp_async.cuh"

namespace nf4::cuda {
namespace {

// The rows of an operand that a thread copies: every kStep-th of `rows` rows that lie one after the
// other.
template <int Rows, int kStep>
class EvenRows {
 public:
  __device__ __forceinline__ EvenRows(const void *first, int64_t row_bytes, int64_t rows, int own)
      : from_(static_cast<const uint8_t *>(first)), step_bytes_(row_bytes * kStep) {
    const int left = static_cast<int>(min(rows, int64_t{Rows})) - own;
    count_ = left <= 0 ? 0 : (left + kStep - 1) / kStep;
    // An only row may have any stride, and others no address of their own.
    if (left > 0) from_ += own * row_bytes;
  }
  __device__ __forceinline__ bool exists(int i) const { return i < count_; }
  __device__ __forceinline__ const uint8_t *operator[](int i) const {
    return from_ + i * step_bytes_;
  }
  __device__ __forceinline__ void advance(int bytes) { from_ += bytes; }

 private:
  const uint8_t *from_;
  const int64_t step_bytes_;
  int count_;
};

// A thread's copies of one operand's K-tiles: a chunk of 16 bytes in each kRowStep-th row. Rows
// that do not exist are zeros.
template <class Arch, int Rows, int RowChunks,
          class RowsOf = EvenRows<Rows, kMultistageThreads / RowChunks>>
class TileCopies {
  static constexpr int kRowStep = kMultistageThreads / RowChunks;
  static constexpr bool kIdle = Rows < kRowStep;  // some threads have no row

 public:
  static constexpr int kPieces = (Rows + kRowStep - 1) / kRowStep;
  // The K-tiles that registers hold, beyond those in the stages.
  static constexpr int kHeld = Arch::kTensorCores ? 0 : 1;

  static __device__ __forceinline__ int row() { return threadIdx.x / RowChunks; }
  static __device__ __forceinline__ int chunk() { return threadIdx.x % RowChunks; }

  // `to` is this thread's place in a stage.
  __device__ __forceinline__ TileCopies(RowsOf rows, int to) : rows_(rows), to_(to) {
    rows_.advance(chunk() * 16);
  }

  // Starts to copy a piece of the next K-tile; if not `more`, there is none. With registers, the
  // piece that they hold goes to the stage, and they get that of the K-tile after it.
  template <int StagePieceBytes>
  __device__ __forceinline__ void copy(int piece, uint8_t *stage, bool more) {
    if (kIdle && row() >= Rows) return;
    uint8_t *const to = stage + to_ + piece * StagePieceBytes;
    const bool exists = more && rows_.exists(piece);
    if constexpr (kHeld == 0) {
      cp_async_16(to, rows_[piece], exists ? 16 : 0);
    } else {
      *reinterpret_cast<uint4 *>(to) = held_[piece];
      hold(piece, exists);
    }
  }
  __device__ __forceinline__ void advance() { rows_.advance(RowChunks * 16); }

  // Comes before the first copy. With registers, starts to load the first K-tile.
  __device__ __forceinline__ void begin() {
    if constexpr (kHeld > 0) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) hold(piece, rows_.exists(piece));
      advance();
    }
  }

 private:
  __device__ __forceinline__ void hold(int piece, bool exists) {
    held_[piece] = uint4{};
    if (exists) held_[piece] = *reinterpret_cast<const uint4 *>(rows_[piece]);
  }

  RowsOf rows_;
  const int to_;
  uint4 held_[kHeld == 0 ? 1 : kPieces];
};

}  // namespace
}  // namespace nf4::cuda
