// The launch of the mma kernel, which runs any product on any GPU.
#pragma once

#include "cuda/matmul/args.hpp"
#include "cuda/matmul/configs.hpp"
#include "cuda/matmul/target.hpp"
#include "cuda/runtime/launch.hpp"

namespace nf4::cuda {

// The CTA tile.
constexpr int kMmaTileN = kMatmulConfigs[kMma64x64].tile_n;
constexpr int kMmaTileM = kMatmulConfigs[kMma64x64].tile_m;
constexpr int kMmaThreads = 256;

template <class Args>
cudaError_t launch_mma(const MatmulTarget &target, const void *kernel, const Args &args) {
  const int64_t ctas = ceil_divide(args.weight.rows, kMmaTileN) * ceil_divide(args.m, kMmaTileM);
  return launch({kernel, ctas, kMmaThreads, target.family->pdl, target.stream}, args);
}

}  // namespace nf4::cuda
