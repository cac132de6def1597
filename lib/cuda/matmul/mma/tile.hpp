// The CTA tile of the mma kernels. No CUDA types.
#pragma once

#include <cstdint>

#include "cuda/matmul/configs.hpp"

namespace nf4::cuda {

constexpr int kMmaTileN = kMatmulConfigs[kMma64x64].tile_n;
constexpr int kMmaTileM = kMatmulConfigs[kMma64x64].tile_m;
constexpr int kMmaTileK = 64;
constexpr int kMmaThreads = 256;

// Integer weights have a kernel for up to so many rows of x, which a cluster of CTAs shares along
// K.
constexpr int kFewRowsOfX = 16;

}  // namespace nf4::cuda
