// The stage of x: rows of a K-tile of 64 columns in shared memory, and operand B of mma.m16n8k16
// from them.
//
// The columns of a K-tile are multiplied in an order in which each lane's columns are neighbours:
// lane t of four has columns 16t to 16t + 15. It therefore loads operand A as whole words of codes
// and B in chunks of 16 bytes, each for two k-steps. A row has 128 bytes; odd rows exchange the
// chunks of each pair, so that the eight lanes that load at a time read from different banks.
#pragma once

#include <cstdint>

#include "cuda/matmul/multistage/copies.cuh"
#include "cuda/matmul/multistage/tile.hpp"

namespace nf4::cuda {
namespace {

// A thread's copies of x, whose rows RowsOf finds.
template <class Arch, int TileM, class RowsOf = EvenRows<TileM, kMultistageXRowStep>>
class XLoader : public TileCopies<Arch, TileM, 8, RowsOf> {
  using Copies = TileCopies<Arch, TileM, 8, RowsOf>;

 public:
  static constexpr int kBytes = TileM * kMultistageXRowBytes;

  __device__ __forceinline__ explicit XLoader(RowsOf rows)
      : Copies(rows,
               Copies::row() * kMultistageXRowBytes + (Copies::chunk() ^ Copies::row() % 2) * 16) {}

  __device__ __forceinline__ void copy(int piece, uint8_t *stage, bool more) {
    Copies::template copy<kMultistageXRowStep * kMultistageXRowBytes>(piece, stage, more);
  }
};

// The rows of x from first_m on, from a K-tile on.
template <class T, int TileM, class Args>
__device__ __forceinline__ EvenRows<TileM, kMultistageXRowStep> x_rows(const Args &args,
                                                                       int64_t first_m,
                                                                       int k_tile) {
  return {static_cast<const T *>(args.x) + first_m * args.x_stride + k_tile * kMultistageTileK,
          args.x_stride * 2, args.m - first_m, static_cast<int>(threadIdx.x / 8)};
}

// The offset of a lane's chunk for the first two k-steps of row lane / 4. That for the other two
// differs in bit 4.
__device__ __forceinline__ int x_lane_offset() {
  const int row = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  return row * kMultistageXRowBytes + (2 * t ^ row % 2) * 16;
}

}  // namespace
}  // namespace nf4::cuda
