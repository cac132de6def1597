// Brings the codes of a K-tile to the registers of a lane, for the multistage kernels and weights
// whose rows are packed along k, eight codes a word: codebooks and compressed-tensors.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/matmul/multistage/copies.cuh"
#include "cuda/matmul/multistage/tile.hpp"

namespace nf4::cuda {
namespace {

constexpr int kPackedRowBytes = kMultistageTileK / 2;  // one row of a K-tile

// The codes of a lane's four rows, 4g to 4g + 3 of its warp: two words of eight columns each.
struct RowPackedWords {
  uint2 of[4];

  template <int Half>
  __device__ __forceinline__ uint32_t word(int row) const {
    return Half == 0 ? of[row].x : of[row].y;
  }
};

// Through stages, a thread's copies. Four rows lie in 128 bytes, in an order by which the
// half-warps that load 8 bytes a lane read from different banks.
template <class Arch>
class RowPackedStages : public TileCopies<Arch, kMultistageTileN, 2> {
  using Copies = TileCopies<Arch, kMultistageTileN, 2>;
  using Copies::chunk, Copies::row;

 public:
  template <class Args>
  __device__ __forceinline__ RowPackedStages(const Args &args, int64_t first_n, int k_tile)
      : Copies({reinterpret_cast<const uint8_t *>(args.matmul.weight.packed) +
                    first_n * (args.matmul.weight.cols / 2) + k_tile * kPackedRowBytes,
                args.matmul.weight.cols / 2, args.matmul.weight.rows - first_n, row()},
               row() / 4 * 128 + ((row() % 4 ^ row() / 4 % 4) * 2 + chunk()) * 16) {
    const int line = threadIdx.x / 4, t = threadIdx.x % 4;
    words_ = line * 128 + (line % 4 * 2 + t / 2) * 16 + t % 2 * 8;
  }

  __device__ __forceinline__ void copy(int piece, uint8_t *stage, bool more) {
    Copies::template copy<kMultistageThreads / 2 * kPackedRowBytes>(piece, stage, more);
  }

  // Loads the words of the next K-tile from its stage.
  __device__ __forceinline__ void load(RowPackedWords &words, const uint8_t *stage, bool) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words.of[i] = *reinterpret_cast<const uint2 *>(stage + (words_ ^ i * 32));
  }

 private:
  int words_;  // the offset of the lane's own
};

// Where there is no cp.async, words go from memory to registers. Those of the next K-tile are in
// flight.
class RowPackedRegisters {
 public:
  static constexpr int kPieces = 0;

  template <class Args>
  __device__ __forceinline__ RowPackedRegisters(const Args &args, int64_t first_n, int k_tile)
      : row_bytes_(args.matmul.weight.cols / 2) {
    // Past the last row of the weight are copies of it.
    const int64_t last = args.matmul.weight.rows - 1;
    const int64_t n = min(first_n + threadIdx.x / 4 * 4, last);
    last_ = static_cast<int>(min(last - n, int64_t{3}));
    from_ = reinterpret_cast<const uint8_t *>(args.matmul.weight.packed) + n * row_bytes_ +
            k_tile * kPackedRowBytes + threadIdx.x % 4 * sizeof(uint2);
  }

  __device__ __forceinline__ void begin() { start(); }
  __device__ __forceinline__ void advance() const {}
  __device__ __forceinline__ void copy(int, uint8_t *, bool) const {}

  // Returns the words of the next K-tile. If there are `more`, starts to load those after it.
  __device__ __forceinline__ void load(RowPackedWords &words, const uint8_t *, bool more) {
    words = next_;
    from_ += kPackedRowBytes;
    if (more) start();
  }

 private:
  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      next_.of[i] = *reinterpret_cast<const uint2 *>(from_ + min(i, last_) * row_bytes_);
  }

  const int64_t row_bytes_;
  const uint8_t *from_;
  int last_;  // the last row that is loaded
  RowPackedWords next_;
};

template <class Arch>
using RowPackedLoader =
    std::conditional_t<Arch::kTensorCores, RowPackedStages<Arch>, RowPackedRegisters>;

}  // namespace
}  // namespace nf4::cuda
