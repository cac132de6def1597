// Each expert's y = x W^T with the mma kernel's tiles, for any product on any GPU. CTAs walk over
// the tiles of all experts, which they find on the device. The rows of a K-tile of x are gathered.
//
// Cost and bound are those of matmul/mma/kernel.cuh; experts with few rows fill their tiles badly.
#pragma once

#include "cuda/matmul/mma/kernel.cuh"
#include "cuda/matmul_grouped/routing.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T, class Source, class Mma = ProductsOf<Arch, T, Source>>
__global__ void __launch_bounds__(kMmaThreads)
    matmul_grouped_mma(const __grid_constant__ GroupedArgsOf<typename Source::Args> args) {
  __shared__ uint4 chunks[2][kMmaTileN * SmemTile<T>::kRowChunks];
  __shared__ float scale_code[Source::kScaleCodeSize];
  __shared__ float codebook[Source::kCodebookSize];
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  const Groups &groups = args.groups;
  const Routing<kMmaTileM> routing(groups);
  Source weight(args, scale_code, codebook);
  const SmemTile<T> w(chunks[0]), x(chunks[1]);

  const int64_t n_tiles = (groups.expert_rows + kMmaTileN - 1) / kMmaTileN;
  const int64_t tiles = routing.chunks() * n_tiles;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const RowChunk chunk = routing.at(static_cast<int>(tile / n_tiles));
    const int64_t first_n = tile % n_tiles * kMmaTileN;
    const int row = static_cast<int>(threadIdx.x) / kVectorsPerTileK;
    const int64_t x_row =
        row < chunk.rows ? x_row_of(groups, args.m, chunk.first_row + row) : args.m;
    Mma mma;
    weight.select_expert(chunk.expert);
    multiply_tile<T>(args, weight, first_n, x_row, w, x, mma);
    T *const y = static_cast<T *>(args.y) + chunk.first_row * args.y_stride;
    mma.each([&](int i, int j, float sum) {
      const int64_t n = first_n + i;
      if (n >= groups.expert_rows || j >= chunk.rows) return;
      y[j * args.y_stride + n] =
          from_float<T>(finish_output<T>(args, groups, chunk.expert, chunk.first_row + j, n, sum));
    });
  }
}

}  // namespace
}  // namespace nf4::cuda
