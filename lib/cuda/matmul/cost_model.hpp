// The estimated cost of matmul's configurations, in cycles.
#pragma once

#include <cstdint>

#include "cuda/matmul/configs.hpp"
#include "cuda/weight/transposed.hpp"
#include "problem.hpp"

namespace nf4::cuda {

struct CostModel {
  // wgmma: of a launch, of a tile, and of a K-tile by configuration.
  double start;
  double tile;
  double k_tile[kMatmulConfigCount];
  // Of a cluster that shares a tile (split-K), of each of its CTAs, and of each sum that is sent.
  double cluster_exchange;
  double cluster_cta;
  double cluster_sum;
  // Of stream-K, what tiles of up to 128 rows of x cost besides, of each sum of a tile, and of the
  // same for each further CTA that has a part of it.
  double stream_k_exchange;
  double stream_k_narrow;
  double stream_k_sum;
  double stream_k_peer;
  // Of split-K by a stream-K kernel, and of each sum of a tile that exists.
  double split_k_exchange;
  double split_k_sum;
  // skinny_16: of a launch, and of each element of a CTA; wgmma must cost less than this share.
  double skinny16_start;
  double skinny16_element;
  double skinny16_margin;
  double strip16_start;  // of the strip kernels of integer weights, likewise
  double strip16_element;
  int64_t skinny2_rows_per_cta;       // from which on skinny_2 is faster than skinny_8
  int64_t skinny_prefetch_bytes;      // of a CTA's packed weights, into L2 at the start
  int64_t skinny_prefetch_max_bytes;  // of packed weights that a CTA has, else there is no prefetch
  int64_t l2_kept_bytes;              // of packed weights that stay in L2 beside x and y
};

// Fitted to times in bf16 on an H200 (ten weights) and an H100 (four), with 16 to 4096 rows of x:
// of these products the choice is within 3.1 % of the fastest kernel, 0.1 % on average. Cycles are
// at 1.755 GHz.
inline constexpr CostModel kHopper = {
    6000,                     // start
    1500,                     // tile
    {0,    0,    0,    0,     // k_tile: mma, skinny
     1160, 1470, 2020, 1060,  // up to 64 rows of x
     0,    1650, 1830, 1910, 2070, 2210, 2390, 2670, 1640,
     1860, 1980, 2080, 2290, 2480, 2810, 1530, 1120, 1250},
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

// Of integer weights, by layout, from the times of 171 products in one run on an H200: of the
// kernels that were timed the one of least cycles was within 5 % of the fastest, 0.2 % on average.
// Stream-K and split-K from another run, of 90 products.
constexpr CostModel int4_model(const double (&k_tile)[kMatmulConfigCount]) {
  CostModel model = kHopper;
  for (int i = 0; i < kMatmulConfigCount; ++i) model.k_tile[i] = k_tile[i];
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
inline constexpr CostModel kGptq =
    int4_model({0,    0, 0, 0,    1340, 1540, 0, 990,  0, 1540, 0,    1750, 1940,
                2270, 0, 0, 1490, 0,    0,    0, 2490, 0, 2930, 1540, 980,  1340});
inline constexpr CostModel kAwq =
    int4_model({0,    0, 0, 0,    1240, 1370, 0, 980,  0, 1390, 0,    1600, 1860,
                2270, 0, 0, 1460, 0,    0,    0, 2490, 0, 2970, 1370, 1020, 1240});
inline constexpr CostModel kCompressedTensors =
    int4_model({0,    0, 0, 0,    1430, 1540, 0, 1090, 0, 1490, 0,    1760, 1900,
                2290, 0, 0, 1480, 0,    0,    0, 2500, 0, 2910, 1590, 1040, 1430});

// Of the gradient, by times on an H200.
constexpr CostModel grad_model(const double (&k_tile)[kMatmulConfigCount]) {
  CostModel model = kHopper;
  for (int i = 0; i < kMatmulConfigCount; ++i) model.k_tile[i] = k_tile[i];
  model.stream_k_exchange = 1500;
  model.stream_k_narrow = 0;
  model.stream_k_sum = 0.28;
  model.stream_k_peer = 0.06;
  return model;
}
inline constexpr CostModel kGrad = grad_model(
    {0, 0, 0, 0, 0, 0, 0, 1350, 0, 1720, 0, 0, 0, 2450, 0, 0, 1640, 0, 0, 0, 2650, 0, 0, 0, 1280});

constexpr bool has_k_tiles(const CostModel &model, bool has_kernel(int config)) {
  for (int i = 0; i < kMatmulConfigCount; ++i)
    if (model.k_tile[i] == 0 && is_wgmma(i) && has_kernel(i)) return false;
  return true;
}
// Spot checks of the order, which is that of kMatmulConfigs.
static_assert(has_k_tiles(kHopper, has_codebook_kernel) && has_k_tiles(kGptq, has_int4_kernel) &&
              has_k_tiles(kAwq, has_int4_kernel) &&
              has_k_tiles(kCompressedTensors, has_int4_kernel) &&
              has_k_tiles(kGrad, has_grad_kernel) &&
              kHopper.k_tile[config_named("wgmma_64x128")] == 1060 &&
              kHopper.k_tile[config_named("wgmma_304x128")] == 2670 &&
              kHopper.k_tile[config_named("wgmma_304x128_stream_k")] == 2810 &&
              kAwq.k_tile[config_named("wgmma_64x128_stream_k")] == 1020);

// Other GPUs use these models, too; only Hopper's were timed.
constexpr const CostModel &cost_model() { return kHopper; }
constexpr const CostModel &cost_model(const Weight &) { return kHopper; }
constexpr const CostModel &cost_model(const TransposedWeight &) { return kGrad; }
constexpr const CostModel &cost_model(const Int4Weight &weight) {
  return weight.layout == NF4_INT4_GPTQ  ? kGptq
         : weight.layout == NF4_INT4_AWQ ? kAwq
                                         : kCompressedTensors;
}

}  // namespace nf4::cuda
