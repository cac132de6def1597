// Every kernel configuration of the products, one row each: the compile matrix, and the list of
// tests and benchmarks. A configuration is an index into the table. A row may have several kernels:
// mma_64x64 has another one for integers and up to 16 rows of x (mma/few_rows.cuh), and skinny
// kernels of GPTQ and AWQ have warp tiles or strips (takes_strips()).
#pragma once

#include <cstdint>
#include <string_view>

#include "cuda/weight/transposed.hpp"
#include "problem.hpp"

namespace nf4::cuda {

enum class MatmulKernel : uint8_t { kMma, kSkinny, kWgmma, kMultistage };

// A scale multiplies each weight, as dequantize does, or the fp32 sums of its block.
enum class ScaleOn : uint8_t { kWeights, kSums };

enum class Schedule : uint8_t { kDataParallel, kStreamK };

// The kinds of weight that products multiply. MXFP4 and NVFP4 are kE2m1.
enum class WeightKind : uint8_t { kCodebook, kInt4, kTransposed, kE2m1 };
constexpr WeightKind kind_of(const Weight &weight) {
  return weight.has_scale_bytes() ? WeightKind::kE2m1 : WeightKind::kCodebook;
}
constexpr WeightKind kind_of(const Int4Weight &) { return WeightKind::kInt4; }
constexpr WeightKind kind_of(const TransposedWeight &) { return WeightKind::kTransposed; }

struct MatmulConfig {
  const char *name;
  MatmulKernel kernel;
  int tile_m;  // rows of x of a CTA tile
  int tile_n;  // rows of the weight of a CTA tile; skinny kernels: of a warp tile, not of a strip
  ScaleOn scale_on;
  Schedule schedule;
  // Bits by WeightKind: the kinds for which there are kernels of one product, and of experts.
  // Integers have three layouts, so they have fewer kernels (docs/design/matmul-wgmma.md, "Integer
  // weights"). All kernels of the gradient scale weights.
  uint8_t kinds;
  uint8_t expert_kinds;
};

namespace configs {

constexpr uint8_t kNone = 0, kCodebook = 1 << static_cast<int>(WeightKind::kCodebook),
                  kInt4 = 1 << static_cast<int>(WeightKind::kInt4),
                  kTransposed = 1 << static_cast<int>(WeightKind::kTransposed),
                  kE2m1 = 1 << static_cast<int>(WeightKind::kE2m1),
                  kForward = kCodebook | kInt4 | kE2m1, kAllKinds = kForward | kTransposed;
constexpr MatmulKernel kMma = MatmulKernel::kMma, kSkinny = MatmulKernel::kSkinny,
                       kWgmma = MatmulKernel::kWgmma, kMultistage = MatmulKernel::kMultistage;
constexpr ScaleOn kWeights = ScaleOn::kWeights, kSums = ScaleOn::kSums;
constexpr Schedule kDataParallel = Schedule::kDataParallel, kStreamK = Schedule::kStreamK;

// clang-format off
inline constexpr MatmulConfig kConfigs[] = {
    {"mma_64x64", kMma, 64, 64, kWeights, kDataParallel, kAllKinds, kAllKinds},
    {"skinny_2", kSkinny, 2, 16, kSums, kDataParallel, kForward, kForward},
    {"skinny_8", kSkinny, 8, 16, kSums, kDataParallel, kAllKinds, kForward},
    {"skinny_16", kSkinny, 16, 16, kSums, kDataParallel, kAllKinds, kForward},
    {"wgmma_16x256", kWgmma, 16, 256, kSums, kDataParallel, kForward, kNone},
    {"wgmma_32x256", kWgmma, 32, 256, kSums, kDataParallel, kForward, kForward},
    {"wgmma_64x256", kWgmma, 64, 256, kSums, kDataParallel, kCodebook, kCodebook | kE2m1},
    {"wgmma_64x128", kWgmma, 64, 128, kSums, kDataParallel, kAllKinds, kInt4 | kTransposed},
    {"wgmma_96x256", kWgmma, 96, 256, kWeights, kDataParallel, kNone, kCodebook | kE2m1},
    {"wgmma_128x128", kWgmma, 128, 128, kWeights, kDataParallel, kAllKinds, kInt4 | kTransposed},
    {"wgmma_152x128", kWgmma, 152, 128, kWeights, kDataParallel, kCodebook, kCodebook | kE2m1},
    {"wgmma_176x128", kWgmma, 176, 128, kWeights, kDataParallel, kForward, kNone},
    {"wgmma_208x128", kWgmma, 208, 128, kWeights, kDataParallel, kForward, kCodebook | kE2m1},
    {"wgmma_256x128", kWgmma, 256, 128, kWeights, kDataParallel, kAllKinds, kTransposed},
    {"wgmma_272x128", kWgmma, 272, 128, kWeights, kDataParallel, kCodebook, kNone},
    {"wgmma_304x128", kWgmma, 304, 128, kWeights, kDataParallel, kCodebook, kCodebook | kE2m1},
    {"wgmma_128x128_stream_k", kWgmma, 128, 128, kWeights, kStreamK, kAllKinds, kNone},
    {"wgmma_152x128_stream_k", kWgmma, 152, 128, kWeights, kStreamK, kCodebook, kNone},
    {"wgmma_176x128_stream_k", kWgmma, 176, 128, kWeights, kStreamK, kCodebook, kNone},
    {"wgmma_208x128_stream_k", kWgmma, 208, 128, kWeights, kStreamK, kCodebook, kNone},
    {"wgmma_256x128_stream_k", kWgmma, 256, 128, kWeights, kStreamK, kAllKinds, kNone},
    {"wgmma_272x128_stream_k", kWgmma, 272, 128, kWeights, kStreamK, kCodebook, kNone},
    {"wgmma_304x128_stream_k", kWgmma, 304, 128, kWeights, kStreamK, kCodebook | kInt4, kNone},
    {"wgmma_32x256_stream_k", kWgmma, 32, 256, kSums, kStreamK, kForward, kNone},
    {"wgmma_64x128_stream_k", kWgmma, 64, 128, kSums, kStreamK, kAllKinds, kNone},
    {"wgmma_16x256_stream_k", kWgmma, 16, 256, kSums, kStreamK, kForward, kNone},
    {"multistage_16x256", kMultistage, 16, 256, kSums, kStreamK, kAllKinds, kCodebook | kE2m1},
    {"multistage_32x256", kMultistage, 32, 256, kSums, kStreamK, kAllKinds, kCodebook | kE2m1},
    {"multistage_64x256", kMultistage, 64, 256, kSums, kStreamK, kAllKinds, kCodebook | kE2m1},
    {"multistage_128x256", kMultistage, 128, 256, kWeights, kStreamK, kAllKinds, kCodebook | kE2m1},
};
// clang-format on

}  // namespace configs

inline constexpr auto &kMatmulConfigs = configs::kConfigs;
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

constexpr bool is_mma(int config) { return kMatmulConfigs[config].kernel == MatmulKernel::kMma; }
constexpr bool is_skinny(int config) {
  return kMatmulConfigs[config].kernel == MatmulKernel::kSkinny;
}
constexpr bool is_wgmma(int config) {
  return kMatmulConfigs[config].kernel == MatmulKernel::kWgmma;
}
constexpr bool is_multistage(int config) {
  return kMatmulConfigs[config].kernel == MatmulKernel::kMultistage;
}
constexpr bool is_stream_k(int config) {
  return kMatmulConfigs[config].schedule == Schedule::kStreamK;
}

// Returns the first configuration of which `is` is true.
constexpr int first_config(bool is(int config)) {
  int config = 0;
  while (!is(config)) ++config;
  return config;
}

constexpr int kFirstSkinny = first_config(is_skinny);
constexpr int kSkinnyCount = kSkinny16 - kFirstSkinny + 1;

// mma_64x64 is compiled for every family of GPUs, the skinny and the multistage configurations for
// families with kTensorCores, and for codebooks and fp16 without them, and the wgmma configurations
// for Hopper alone. Among these, those of stream-K come last.
constexpr int kFirstWgmma = first_config(is_wgmma);
constexpr int kFirstStreamK = first_config(is_stream_k);
// All configurations from this one to the last are multistage.
constexpr int kFirstMultistage = first_config(is_multistage);
constexpr int kMultistageCount = kMatmulConfigCount - kFirstMultistage;

constexpr bool configs_in_order() {
  for (int i = 0; i < kMatmulConfigCount; ++i)
    if (is_skinny(i) != (i >= kFirstSkinny && i <= kSkinny16) ||
        is_wgmma(i) != (i >= kFirstWgmma && i < kFirstMultistage) ||
        is_multistage(i) != (i >= kFirstMultistage) || is_stream_k(i) != (i >= kFirstStreamK))
      return false;
  return true;
}
static_assert(configs_in_order());

// The multistage configuration whose tile holds m rows of x, or the widest.
constexpr int multistage_config(int64_t m) {
  int config = kFirstMultistage;
  while (config + 1 < kMatmulConfigCount && kMatmulConfigs[config].tile_m < m) ++config;
  return config;
}

constexpr int kMaxClusterSize = 8;  // wgmma kernels; every GPU with clusters allows it

// Whether CTAs may share each tile of a stream-K configuration (split-K): not the widest, whose
// sums fill the registers.
constexpr bool has_split_k(int config) {
  return is_wgmma(config) && is_stream_k(config) && kMatmulConfigs[config].tile_m <= 256;
}

constexpr bool has_kernel(WeightKind kind, int config) {
  return (kMatmulConfigs[config].kinds >> static_cast<int>(kind) & 1) != 0;
}
constexpr bool has_experts_kernel(WeightKind kind, int config) {
  return (kMatmulConfigs[config].expert_kinds >> static_cast<int>(kind) & 1) != 0;
}

}  // namespace nf4::cuda
