// How the gradient's skinny kernels use strips and shared memory. No CUDA types.
#pragma once

#include "core/formats.hpp"
#include "cuda/matmul/skinny/strip_smem.hpp"

namespace nf4::cuda {

constexpr int kGradWarpsN = 4;  // warps along a strip of 256 columns
constexpr int kGradWarpsK = strip_warps_k(kGradWarpsN);
constexpr int kGradBlocksize = kStripWarpRows;  // a warp's columns have one scale a row

// Offsets in shared memory: the LUT, what strips have, the code of nested scales, and the finished
// scales of each stage: [warp along N][row of the K-tile].
struct GradStripSmem {
  int strip;
  int scale_code;
  int scales;
  int bytes;
};
constexpr int kGradLutBytes = 256 * 256;
constexpr int kGradStageScales = kGradWarpsN * kStripK;
constexpr GradStripSmem grad_strip_smem(int max_m) {
  const StripSmem strip = strip_smem(kGradWarpsN, max_m);
  GradStripSmem smem{};
  smem.strip = kGradLutBytes;
  smem.scale_code = smem.strip + strip.bytes;
  smem.scales = smem.scale_code + kScaleCodeSize * 4;
  smem.bytes = smem.scales + kGradWarpsK * strip.stages * kGradStageScales * 4;
  return smem;
}

}  // namespace nf4::cuda
