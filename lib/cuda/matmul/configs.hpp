// Every kernel configuration of matmul, one row each: the compile matrix and the list of tests and
// benchmarks. A configuration is an index into the table.
#pragma once

#include <cstdint>
#include <string_view>

namespace nf4::cuda {

enum class MatmulKernel : uint8_t { kMma, kSkinny, kWgmma };

// What a scale multiplies: each weight, as dequantize does, or the fp32 sums of its block.
enum class ScaleOn : uint8_t { kWeights, kSums };

enum class Schedule : uint8_t { kDataParallel, kStreamK };

struct MatmulConfig {
  const char *name;
  MatmulKernel kernel;
  int tile_m;  // of the CTA tile: rows of x
  int tile_n;  // rows of the weight; of skinny kernels, a warp tile's
  ScaleOn scale_on;
  Schedule schedule;
};

inline constexpr MatmulConfig kMatmulConfigs[] = {
    {"mma_64x64", MatmulKernel::kMma, 64, 64, ScaleOn::kWeights, Schedule::kDataParallel},
    {"skinny_2", MatmulKernel::kSkinny, 2, 16, ScaleOn::kSums, Schedule::kDataParallel},
    {"skinny_8", MatmulKernel::kSkinny, 8, 16, ScaleOn::kSums, Schedule::kDataParallel},
    {"skinny_16", MatmulKernel::kSkinny, 16, 16, ScaleOn::kSums, Schedule::kDataParallel},
    {"wgmma_16x256", MatmulKernel::kWgmma, 16, 256, ScaleOn::kSums, Schedule::kDataParallel},
    {"wgmma_32x256", MatmulKernel::kWgmma, 32, 256, ScaleOn::kSums, Schedule::kDataParallel},
    {"wgmma_64x256", MatmulKernel::kWgmma, 64, 256, ScaleOn::kSums, Schedule::kDataParallel},
    {"wgmma_64x128", MatmulKernel::kWgmma, 64, 128, ScaleOn::kSums, Schedule::kDataParallel},
    {"wgmma_96x256", MatmulKernel::kWgmma, 96, 256, ScaleOn::kWeights, Schedule::kDataParallel},
    {"wgmma_128x128", MatmulKernel::kWgmma, 128, 128, ScaleOn::kWeights, Schedule::kDataParallel},
    {"wgmma_152x128", MatmulKernel::kWgmma, 152, 128, ScaleOn::kWeights, Schedule::kDataParallel},
    {"wgmma_176x128", MatmulKernel::kWgmma, 176, 128, ScaleOn::kWeights, Schedule::kDataParallel},
    {"wgmma_208x128", MatmulKernel::kWgmma, 208, 128, ScaleOn::kWeights, Schedule::kDataParallel},
    {"wgmma_256x128", MatmulKernel::kWgmma, 256, 128, ScaleOn::kWeights, Schedule::kDataParallel},
    {"wgmma_272x128", MatmulKernel::kWgmma, 272, 128, ScaleOn::kWeights, Schedule::kDataParallel},
    {"wgmma_304x128", MatmulKernel::kWgmma, 304, 128, ScaleOn::kWeights, Schedule::kDataParallel},
    {"wgmma_128x128_stream_k", MatmulKernel::kWgmma, 128, 128, ScaleOn::kWeights,
     Schedule::kStreamK},
    {"wgmma_152x128_stream_k", MatmulKernel::kWgmma, 152, 128, ScaleOn::kWeights,
     Schedule::kStreamK},
    {"wgmma_176x128_stream_k", MatmulKernel::kWgmma, 176, 128, ScaleOn::kWeights,
     Schedule::kStreamK},
    {"wgmma_208x128_stream_k", MatmulKernel::kWgmma, 208, 128, ScaleOn::kWeights,
     Schedule::kStreamK},
    {"wgmma_256x128_stream_k", MatmulKernel::kWgmma, 256, 128, ScaleOn::kWeights,
     Schedule::kStreamK},
    {"wgmma_272x128_stream_k", MatmulKernel::kWgmma, 272, 128, ScaleOn::kWeights,
     Schedule::kStreamK},
    {"wgmma_304x128_stream_k", MatmulKernel::kWgmma, 304, 128, ScaleOn::kWeights,
     Schedule::kStreamK},
    {"wgmma_32x256_stream_k", MatmulKernel::kWgmma, 32, 256, ScaleOn::kSums, Schedule::kStreamK},
    {"wgmma_64x128_stream_k", MatmulKernel::kWgmma, 64, 128, ScaleOn::kSums, Schedule::kStreamK},
    {"wgmma_16x256_stream_k", MatmulKernel::kWgmma, 16, 256, ScaleOn::kSums, Schedule::kStreamK},
};
constexpr int kMatmulConfigCount = sizeof kMatmulConfigs / sizeof kMatmulConfigs[0];

constexpr int config_named(std::string_view name) {
  for (int i = 0; i < kMatmulConfigCount; ++i)
    if (name == kMatmulConfigs[i].name) return i;
  return -1;
}

constexpr int kMma64x64 = config_named("mma_64x64");
constexpr int kSkinny2 = config_named("skinny_2");
constexpr int kSkinny8 = config_named("skinny_8");
constexpr int kSkinny16 = config_named("skinny_16");

// Compiled for every family of GPUs; those of wgmma, which follow, for Hopper alone.
constexpr int kFamilyConfigCount = kSkinny16 + 1;
constexpr int kFirstWgmma = kFamilyConfigCount;
constexpr int kFirstStreamK = config_named("wgmma_128x128_stream_k");

constexpr int kMaxClusterSize = 8;  // of wgmma kernels: what any GPU allows

constexpr bool is_skinny(int config) {
  return kMatmulConfigs[config].kernel == MatmulKernel::kSkinny;
}
constexpr bool is_wgmma(int config) {
  return kMatmulConfigs[config].kernel == MatmulKernel::kWgmma;
}
constexpr bool is_stream_k(int config) {
  return kMatmulConfigs[config].schedule == Schedule::kStreamK;
}

// Whether CTAs may share each tile of a stream-K configuration (split-K): not the widest, whose
// sums fill the registers.
constexpr bool has_split_k(int config) {
  return is_stream_k(config) && kMatmulConfigs[config].tile_m <= 256;
}

template <int Count>
constexpr bool is_named(int config, const std::string_view (&names)[Count]) {
  for (const std::string_view name : names)
    if (name == kMatmulConfigs[config].name) return true;
  return false;
}

// Whether there are kernels of a weight with a codebook in the configuration: not in that of
// experts alone.
constexpr bool has_codebook_kernel(int config) { return !is_named(config, {"wgmma_96x256"}); }

// Whether there are wgmma kernels of integer weights in the configuration. They have three layouts,
// so they do without those that gain little (docs/design/matmul-wgmma.md, "Integer weights").
constexpr bool has_int4_kernel(int config) {
  constexpr std::string_view kNames[] = {
      "wgmma_16x256",           "wgmma_32x256",           "wgmma_64x128",
      "wgmma_128x128",          "wgmma_176x128",          "wgmma_208x128",
      "wgmma_256x128",          "wgmma_32x256_stream_k",  "wgmma_64x128_stream_k",
      "wgmma_128x128_stream_k", "wgmma_256x128_stream_k", "wgmma_304x128_stream_k",
      "wgmma_16x256_stream_k"};
  return is_named(config, kNames);
}

// Whether there are kernels of the gradient, which multiplies W^T, in the configuration; all of
// them scale weights.
constexpr bool has_grad_kernel(int config) {
  constexpr std::string_view kNames[] = {"wgmma_64x128",           "wgmma_128x128",
                                         "wgmma_256x128",          "wgmma_64x128_stream_k",
                                         "wgmma_128x128_stream_k", "wgmma_256x128_stream_k"};
  return is_named(config, kNames);
}

}  // namespace nf4::cuda
