// Weights whose rows are packed along k, eight codes a word, for the multistage kernels: codebooks
// and compressed-tensors.
//
// Rows of a K-tile have 32 bytes: four lie in 128 bytes, in an order by which the half-warps that
// load 8 bytes a lane read from different banks.
#pragma once

#include <cstdint>

#include "cuda/matmul/multistage/copies.cuh"
#include "cuda/matmul/multistage/tile.hpp"

namespace nf4::cuda {
namespace {

// A thread's copies of the codes.
class RowPackedLoader : public TileCopies<kMultistageTileN, 2> {
  using Copies = TileCopies<kMultistageTileN, 2>;
  static constexpr int kRowBytes = kMultistageTileK / 2;

 public:
  template <class Args>
  __device__ __forceinline__ RowPackedLoader(const Args &args, int64_t first_n, int k_tile)
      : Copies(reinterpret_cast<const uint8_t *>(args.matmul.weight.packed) +
                   first_n * (args.matmul.weight.cols / 2) + k_tile * kRowBytes,
               args.matmul.weight.cols / 2, args.matmul.weight.rows - first_n,
               row() / 4 * 128 + ((row() % 4 ^ row() / 4 % 4) * 2 + chunk()) * 16) {}

  __device__ __forceinline__ void copy(int piece, uint8_t *stage, bool more) const {
    Copies::template copy<kMultistageThreads / 2 * kRowBytes>(piece, stage, more);
  }
};

// The codes of a lane's four rows, 4g to 4g + 3 of its warp: two words of eight columns each.
struct RowPackedWords {
  uint2 of[4];

  template <int Half>
  __device__ __forceinline__ uint32_t word(int row) const {
    return Half == 0 ? of[row].x : of[row].y;
  }
};

class RowPackedLane {
 public:
  __device__ __forceinline__ RowPackedLane() {
    const int line = threadIdx.x / 4, t = threadIdx.x % 4;
    offset_ = line * 128 + (line % 4 * 2 + t / 2) * 16 + t % 2 * 8;
  }
  __device__ __forceinline__ void load(RowPackedWords &words, const uint8_t *stage) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words.of[i] = *reinterpret_cast<const uint2 *>(stage + (offset_ ^ i * 32));
  }

 private:
  int offset_;
};

}  // namespace
}  // namespace nf4::cuda
