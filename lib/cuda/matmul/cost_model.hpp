// The estimated cost of matmul's configurations, in cycles. One model so far, the H200's.
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

// From times in bf16 at 1.755 GHz; the K-tiles of 176 and 208 rows are interpolated. Of 50
// products, 16 to 128 rows of x by ten weights, the configuration of least cycles was the fastest
// of all that were timed for 44, and within 2.1 % of it for all.
inline constexpr CostModel kH200 = {
    6000,                     // start
    1500,                     // tile
    {0,    0,    0,    0,     // k_tile: mma, skinny
     1200, 1440, 2040, 1065,  // up to 64 rows of x
     0,    1590, 1780, 1930, 2090, 2290, 2430, 2650, 1620,
     1810, 1960, 2130, 2330, 2460, 2690, 1440, 1065, 1200},
    1000,   // cluster_exchange
    200,    // cluster_cta
    0.5,    // cluster_sum
    1500,   // stream_k_exchange
    4000,   // stream_k_narrow
    0.28,   // stream_k_sum
    0.06,   // stream_k_peer
    6000,   // split_k_exchange
    0.225,  // split_k_sum
    // From 19.8 us at 14336x4096, 7.9 at 4096x4096 and 20.5 at 4096x14336, within 4 %; at
    // 28672x8192 it took 61.5, 16 % less, where wgmma takes less still.
    5100,    // skinny16_start
    0.0675,  // skinny16_element
    0.94,    // skinny16_margin
    // From 15.9 us at 14336x4096, 7.8 at 4096x4096 and 15.1 at 4096x14336 (GPTQ), within 4 %.
    8900,    // strip16_start
    0.0363,  // strip16_element
    // skinny_2 takes less time for a warp tile, skinny_8 starts and ends sooner: 6.1 us instead of
    // 5.3 with 31 rows of 4096 columns a CTA, 11.5 instead of 12.2 with 109.
    64,  // skinny2_rows_per_cta
    // More prefetch delays the kernel's first small loads; where a CTA has much to read it does not
    // help.
    32 << 10,   // skinny_prefetch_bytes
    512 << 10,  // skinny_prefetch_max_bytes
    32 << 20};  // l2_kept_bytes

// Of integer weights, by layout, from the times of 171 products in one run: of the kernels that
// were timed the one of least cycles was within 5 % of the fastest, 0.2 % on average. Stream-K and
// split-K from another run, of 90 products.
constexpr CostModel int4_model(const double (&k_tile)[kMatmulConfigCount]) {
  CostModel model = kH200;
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
  model.skinny16_margin = 0.98;
  return model;
}
inline constexpr CostModel kH200Gptq =
    int4_model({0,    0, 0, 0,    1340, 1540, 0, 990,  0, 1540, 0,    1750, 1940,
                2270, 0, 0, 1490, 0,    0,    0, 2490, 0, 2930, 1540, 980,  1340});
inline constexpr CostModel kH200Awq =
    int4_model({0,    0, 0, 0,    1240, 1370, 0, 980,  0, 1390, 0,    1600, 1860,
                2270, 0, 0, 1460, 0,    0,    0, 2490, 0, 2970, 1370, 1020, 1240});
inline constexpr CostModel kH200CompressedTensors =
    int4_model({0,    0, 0, 0,    1430, 1540, 0, 1090, 0, 1490, 0,    1760, 1900,
                2290, 0, 0, 1480, 0,    0,    0, 2500, 0, 2910, 1590, 1040, 1430});

// Of the gradient, of which the machinery is the codebook kernels'.
constexpr CostModel grad_model(const double (&k_tile)[kMatmulConfigCount]) {
  CostModel model = kH200;
  for (int i = 0; i < kMatmulConfigCount; ++i) model.k_tile[i] = k_tile[i];
  model.stream_k_narrow = 0;
  return model;
}
inline constexpr CostModel kH200Grad = grad_model(
    {0, 0, 0, 0, 0, 0, 0, 1350, 0, 1720, 0, 0, 0, 2450, 0, 0, 1640, 0, 0, 0, 2650, 0, 0, 0, 1280});

constexpr bool has_k_tiles(const CostModel &model, bool has_kernel(int config)) {
  for (int i = 0; i < kMatmulConfigCount; ++i)
    if (model.k_tile[i] == 0 && is_wgmma(i) && has_kernel(i)) return false;
  return true;
}
// Spot checks of the order, which is that of kMatmulConfigs.
static_assert(has_k_tiles(kH200, has_codebook_kernel) && has_k_tiles(kH200Gptq, has_int4_kernel) &&
              has_k_tiles(kH200Awq, has_int4_kernel) &&
              has_k_tiles(kH200CompressedTensors, has_int4_kernel) &&
              has_k_tiles(kH200Grad, has_grad_kernel) &&
              kH200.k_tile[config_named("wgmma_64x128")] == 1065 &&
              kH200.k_tile[config_named("wgmma_304x128")] == 2650 &&
              kH200.k_tile[config_named("wgmma_304x128_stream_k")] == 2690 &&
              kH200Awq.k_tile[config_named("wgmma_64x128_stream_k")] == 1020);

// GPUs that were not measured use the H200's.
constexpr const CostModel &cost_model() { return kH200; }
constexpr const CostModel &cost_model(const Weight &) { return kH200; }
constexpr const CostModel &cost_model(const TransposedWeight &) { return kH200Grad; }
constexpr const CostModel &cost_model(const Int4Weight &weight) {
  return weight.layout == NF4_INT4_GPTQ  ? kH200Gptq
         : weight.layout == NF4_INT4_AWQ ? kH200Awq
                                         : kH200CompressedTensors;
}

}  // namespace nf4::cuda
