// The estimated cost of the wgmma configurations and of skinny_16, in cycles at 1.755 GHz: rows by
// configuration, and a column by kind of weight. mma_64x64, skinny_2 and skinny_8 have no cost:
// choose_skinny() chooses them by rules. Only an H200 and an H100 were timed; other GPUs use the
// same figures.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/matmul/configs.hpp"
#include "cuda/weight/transposed.hpp"
#include "problem.hpp"

namespace nf4::cuda {

using CyclesByConfig = std::array<double, kMatmulConfigCount>;

// The cycles of a K-tile; 0 where there is no kernel.
struct KTileCycles {
  std::string_view config;
  double codebook;
  double transposed;
  double gptq;
  double awq;
  double compressed_tensors;
};
// clang-format off
inline constexpr KTileCycles kHopperKTiles[] = {
    {"wgmma_16x256", 1160, 0, 1340, 1240, 1430},
    {"wgmma_32x256", 1470, 0, 1540, 1370, 1540},
    {"wgmma_64x256", 2020, 0, 0, 0, 0},
    {"wgmma_64x128", 1060, 1350, 990, 980, 1090},
    {"wgmma_128x128", 1650, 1720, 1540, 1390, 1490},
    {"wgmma_152x128", 1830, 0, 0, 0, 0},
    {"wgmma_176x128", 1910, 0, 1750, 1600, 1760},
    {"wgmma_208x128", 2070, 0, 1940, 1860, 1900},
    {"wgmma_256x128", 2210, 2450, 2270, 2270, 2290},
    {"wgmma_272x128", 2390, 0, 0, 0, 0},
    {"wgmma_304x128", 2670, 0, 0, 0, 0},
    {"wgmma_128x128_stream_k", 1640, 1640, 1490, 1460, 1480},
    {"wgmma_152x128_stream_k", 1860, 0, 0, 0, 0},
    {"wgmma_176x128_stream_k", 1980, 0, 0, 0, 0},
    {"wgmma_208x128_stream_k", 2080, 0, 0, 0, 0},
    {"wgmma_256x128_stream_k", 2290, 2650, 2490, 2490, 2500},
    {"wgmma_272x128_stream_k", 2480, 0, 0, 0, 0},
    {"wgmma_304x128_stream_k", 2810, 0, 2930, 2970, 2910},
    {"wgmma_32x256_stream_k", 1530, 0, 1540, 1370, 1590},
    {"wgmma_64x128_stream_k", 1120, 1280, 980, 1020, 1040},
    {"wgmma_16x256_stream_k", 1250, 0, 1340, 1240, 1430},
};
// clang-format on

constexpr CyclesByConfig k_tile_cycles(double KTileCycles::*column) {
  CyclesByConfig cycles{};
  for (const KTileCycles &row : kHopperKTiles) cycles[config_named(row.config)] = row.*column;
  return cycles;
}

struct CostModel {
  // The cycles of a launch, of a tile, and of a K-tile.
  double start;
  double tile;
  CyclesByConfig k_tile;
  // A cluster that shares a tile (split-K): of the exchange, of each CTA, of each sum that it
  // sends.
  double cluster_exchange;
  double cluster_cta;
  double cluster_sum;
  // Stream-K: of the exchange, in addition for tiles of up to 128 rows of x, of each sum of a tile,
  // and of each sum for each further CTA that has a part of the tile.
  double stream_k_exchange;
  double stream_k_narrow;
  double stream_k_sum;
  double stream_k_peer;
  // Split-K by a stream-K kernel: of the exchange, and of each sum of a tile that is within y.
  double split_k_exchange;
  double split_k_sum;
  // skinny_16: of a launch, and of each weight of a CTA. wgmma is chosen only below skinny16_margin
  // times that estimate. The strip kernels of integer weights have their own two figures.
  double skinny16_start;
  double skinny16_element;
  double skinny16_margin;
  double strip16_start;
  double strip16_element;
  int64_t skinny2_rows_per_cta;       // rows per CTA from which skinny_2 beats skinny_8
  int64_t skinny_prefetch_bytes;      // packed bytes that a CTA prefetches into L2 at its start
  int64_t skinny_prefetch_max_bytes;  // packed bytes of a CTA above which it prefetches nothing
  int64_t l2_kept_bytes;              // packed bytes that stay in L2 beside x and y
};

// codebook: fitted to times in bf16 of ten weights on an H200 and four on an H100, with 16 to 4096
// rows of x. The choice is within 3.1 % of the fastest kernel for these products, 0.1 % on average.
inline constexpr CostModel kCodebookCosts = {
    6000,  // start
    1500,  // tile
    k_tile_cycles(&KTileCycles::codebook),
    1000,    // cluster_exchange
    200,     // cluster_cta
    0.5,     // cluster_sum
    1900,    // stream_k_exchange
    2600,    // stream_k_narrow
    0.34,    // stream_k_sum
    0.1,     // stream_k_peer
    7700,    // split_k_exchange
    0.251,   // split_k_sum
    4100,    // skinny16_start
    0.0735,  // skinny16_element
    0.94,    // skinny16_margin
    // From 15.9 us at 14336x4096, 7.8 at 4096x4096 and 15.1 at 4096x14336 (GPTQ), within 4 %.
    8900,    // strip16_start
    0.0363,  // strip16_element
    // skinny_2 takes less time for a warp tile, skinny_8 starts and ends sooner: with 31 rows a CTA
    // skinny_2 takes 1.07 to 1.27 of skinny_8's time, with 83 to 109 0.99 to 1.06, with 144 and
    // 217 0.93 to 0.98. Weights in one launch, such as gate and up, have those rows together.
    64,  // skinny2_rows_per_cta
    // More prefetch delays the kernel's first small loads; where a CTA has much to read it does not
    // help.
    32 << 10,   // skinny_prefetch_bytes
    512 << 10,  // skinny_prefetch_max_bytes
    32 << 20};  // l2_kept_bytes

// Integer weights: fitted to the times of 171 products in one run on an H200. The kernel with the
// fewest cycles is within 5 % of the fastest that was timed, 0.2 % on average. Stream-K and split-K
// are from another run, of 90 products.
constexpr CostModel int4_costs(double KTileCycles::*column) {
  CostModel model = kCodebookCosts;
  model.k_tile = k_tile_cycles(column);
  model.start = 1730;
  model.tile = 3960;
  model.cluster_exchange = 940;
  model.cluster_cta = 150;
  model.cluster_sum = 0.40;
  model.stream_k_exchange = 890;
  model.stream_k_narrow = 3000;
  model.stream_k_sum = 0.14;
  model.stream_k_peer = 0.065;
  model.split_k_exchange = 6900;
  model.split_k_sum = 0.11;
  model.skinny16_start = 5100;
  model.skinny16_element = 0.0675;
  model.skinny16_margin = 0.98;
  return model;
}
inline constexpr CostModel kGptqCosts = int4_costs(&KTileCycles::gptq);
inline constexpr CostModel kAwqCosts = int4_costs(&KTileCycles::awq);
inline constexpr CostModel kCompressedTensorsCosts = int4_costs(&KTileCycles::compressed_tensors);

// The gradient: from times on an H200.
constexpr CostModel transposed_costs() {
  CostModel model = kCodebookCosts;
  model.k_tile = k_tile_cycles(&KTileCycles::transposed);
  model.stream_k_exchange = 1500;
  model.stream_k_narrow = 0;
  model.stream_k_sum = 0.28;
  model.stream_k_peer = 0.06;
  return model;
}
inline constexpr CostModel kTransposedCosts = transposed_costs();

// MXFP4 and NVFP4: those of weights with a codebook.
constexpr CostModel e2m1_costs() {
  CostModel model = kCodebookCosts;
  for (int i = 0; i < kMatmulConfigCount; ++i)
    if (!has_kernel(WeightKind::kE2m1, i)) model.k_tile[i] = 0;
  return model;
}
inline constexpr CostModel kE2m1Costs = e2m1_costs();

// Every wgmma kernel has a cost.
constexpr bool costs_match(const CostModel &model, WeightKind kind) {
  for (int i = kFirstWgmma; i < kFirstMultistage; ++i)
    if (has_kernel(kind, i) != (model.k_tile[i] != 0)) return false;
  return true;
}
static_assert(costs_match(kCodebookCosts, WeightKind::kCodebook) &&
              costs_match(kE2m1Costs, WeightKind::kE2m1) &&
              costs_match(kTransposedCosts, WeightKind::kTransposed) &&
              costs_match(kGptqCosts, WeightKind::kInt4) &&
              costs_match(kAwqCosts, WeightKind::kInt4) &&
              costs_match(kCompressedTensorsCosts, WeightKind::kInt4));

constexpr const CostModel &cost_model() { return kCodebookCosts; }
constexpr const CostModel &cost_model(const Weight &weight) {
  return weight.has_scale_bytes() ? kE2m1Costs : kCodebookCosts;
}
constexpr const CostModel &cost_model(const TransposedWeight &) { return kTransposedCosts; }
constexpr const CostModel &cost_model(const Int4Weight &weight) {
  return weight.layout == NF4_INT4_GPTQ  ? kGptqCosts
         : weight.layout == NF4_INT4_AWQ ? kAwqCosts
                                         : kCompressedTensorsCosts;
}

}  // namespace nf4::cuda
