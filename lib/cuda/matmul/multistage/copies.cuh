// The copies of K-tiles into the stages of a multistage kernel, by cp.async.
#pragma once

#include <cstdint>

#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/ptx/cp_async.cuh"

namespace nf4::cuda {
namespace {

// A thread's copies of one operand's K-tiles: a chunk of 16 bytes in each kRowStep-th row. Rows
// past the last one are zeros.
template <int Rows, int RowChunks>
class TileCopies {
  static constexpr int kRowStep = kMultistageThreads / RowChunks;
  static constexpr bool kIdle = Rows < kRowStep;  // some threads have no row

 public:
  static constexpr int kPieces = (Rows + kRowStep - 1) / kRowStep;

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

  // Copies a piece of the next K-tile; if not `more`, there is none.
  template <int StagePieceBytes>
  __device__ __forceinline__ void copy(int piece, uint8_t *stage, bool more) const {
    if (kIdle && row() >= Rows) return;
    cp_async_16(stage + to_ + piece * StagePieceBytes, from_ + piece * step_bytes_,
                more && piece < pieces_ ? 16 : 0);
  }
  __device__ __forceinline__ void advance() { from_ += RowChunks * 16; }

 private:
  const uint8_t *from_;
  const int64_t step_bytes_;
  int pieces_;  // that exist
  const int to_;
};

}  // namespace
}  // namespace nf4::cuda
