// Each expert's y = x W^T with the tiles of the multistage kernels, for GPUs that have no wgmma.
// CTAs walk over the tiles of all experts, which they find on the device. Copies gather the rows of
// x.
//
// Cost and bound are those of matmul/multistage/kernel.cuh, without stream-K. The tiles of an
// expert that share rows of x follow one another, and so do those that share rows of the weight,
// which L2 holds.
#pragma once

#include <cstdint>

#include "cuda/matmul/multistage/kernel.cuh"
#include "cuda/matmul_grouped/multistage_args.hpp"
#include "cuda/matmul_grouped/routing.cuh"

namespace nf4::cuda {
namespace {

// The rows of x of a chunk that a thread copies, wherever they are.
template <int TileM>
class ChunkRows {
  static constexpr int kCount = (TileM + kMultistageXRowStep - 1) / kMultistageXRowStep;

 public:
  template <class Args>
  __device__ __forceinline__ ChunkRows(const Args &args, const RowChunk &chunk) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = static_cast<int>(threadIdx.x / 8) + i * kMultistageXRowStep;
      const int64_t x_row = row < chunk.rows
                                ? x_row_of(args.groups, args.matmul.m, chunk.first_row + row)
                                : args.matmul.m;
      exists_[i] = x_row < args.matmul.m;
      // An address for rows that do not exist, of which nothing is read.
      rows_[i] = static_cast<const uint8_t *>(args.matmul.x) +
                 (exists_[i] ? x_row : 0) * args.matmul.x_stride * 2;
    }
  }
  __device__ __forceinline__ bool exists(int i) const { return exists_[i]; }
  __device__ __forceinline__ const uint8_t *operator[](int i) const { return rows_[i] + bytes_; }
  __device__ __forceinline__ void advance(int bytes) { bytes_ += bytes; }

 private:
  const uint8_t *rows_[kCount];
  bool exists_[kCount];
  int bytes_ = 0;  // the column
};

template <class T, class Args>
__device__ __forceinline__ YTile<T> y_tile(const Args &args, const RowChunk &chunk,
                                           int64_t first_n) {
  const MatmulArgs &matmul = args.matmul;
  const Groups &groups = args.groups;
  const T *const bias = static_cast<const T *>(matmul.bias);
  return {static_cast<T *>(matmul.y) + chunk.first_row * matmul.y_stride + first_n,
          matmul.y_stride,
          chunk.rows,
          groups.expert_rows - first_n,
          bias == nullptr ? nullptr : bias + chunk.expert * groups.bias_stride + first_n,
          groups.row_scale == nullptr ? nullptr : groups.row_scale + chunk.first_row,
          args.y_vectors};
}

template <class Weight, int TileM>
__global__ void __launch_bounds__(kMultistageThreads, 1)
    matmul_grouped_multistage(const __grid_constant__ GroupedMultistageArgs args) {
  using Mainloop = MultistageMainloop<Weight, TileM>;
  using Arch = typename Weight::Arch;
  using T = typename Weight::Element;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  Mainloop mainloop(args, dynamic, Weight::fill(args, dynamic));
  const Routing<TileM> routing(args.groups);
  __syncthreads();
  const int tiles = routing.chunks() * args.expert_n_tiles;
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x)) {
    const RowChunk chunk = routing.at(tile / args.expert_n_tiles);
    const int64_t first_n = int64_t{tile % args.expert_n_tiles} * kMultistageTileN;
    typename Mainloop::Sums sums;
    mainloop.run(ChunkRows<TileM>(args, chunk), chunk.expert * args.groups.expert_rows + first_n, 0,
                 args.schedule.k_tiles, sums);
    Weight::scale_sums(args, chunk.expert * args.groups.expert_rows + first_n, sums);
    store_y(y_tile<T>(args, chunk, first_n), sums);
  }
}

}  // namespace
}  // namespace nf4::cuda
