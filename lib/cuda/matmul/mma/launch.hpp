// The launches of the mma kernels: matmul_mma, which runs any product on any GPU, and
// matmul_mma_few.
#pragma once

#include <algorithm>

#include "cuda/matmul/args.hpp"
#include "cuda/matmul/mma/tile.hpp"
#include "cuda/matmul/target.hpp"
#include "cuda/runtime/launch.hpp"

namespace nf4::cuda {

template <class Args>
cudaError_t launch_mma(const MatmulTarget &target, const void *kernel, const Args &args) {
  const int64_t ctas = ceil_divide(args.weight.rows, kMmaTileN) * ceil_divide(args.m, kMmaTileM);
  return launch({kernel, ctas, kMmaThreads, target.family->pdl, target.stream}, args);
}

struct Int4FewArgs {
  Int4MatmulArgs matmul;
  int cluster_size;
};

inline cudaError_t launch_mma_few(const MatmulTarget &target, const void *kernel,
                                  const Int4MatmulArgs &args) {
  constexpr int kMinKTiles = 4;  // the least that a CTA gets
  const int64_t n_tiles = ceil_divide(args.weight.rows, kMmaTileN);
  const int64_t k_tiles = ceil_divide(args.weight.cols, kMmaTileK);
  // Two CTAs a multiprocessor less an eighth, as clusters do not fill all of them: a second wave
  // takes longer than idle multiprocessors cost.
  const int64_t ctas = target.gpu.multiprocessors * 7 / 4;
  int64_t size = 1;
  if (target.gpu.tensor_maps)
    size = std::clamp(std::min(ctas / n_tiles, k_tiles / kMinKTiles), int64_t{1},
                      int64_t{kMaxClusterSize});
  const Int4FewArgs few{args, static_cast<int>(size)};
  return launch(
      {kernel, n_tiles * size, kMmaThreads, target.family->pdl, target.stream, 0, few.cluster_size},
      few);
}

}  // namespace nf4::cuda
