// p = x A^T for more than 16 ranks: tiles of 64 rows of x by 32 or 64 ranks, with TMA and mma.sync.
// A warp copies, and eight warps multiply. The CTAs of a cluster share the columns, and add up
// their sums in a fixed order.
//
// Shared memory is the bound: for the 16 KB of a step, the warps read 48 KB. docs/design/lora.md
// has the experiments.
#pragma once

#include <cuda_runtime.h>

#include "cuda/lora/factor_box.cuh"
#include "cuda/lora/product.cuh"
#include "cuda/lora/tma_args.hpp"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace nf4::cuda {
namespace {

constexpr int kWideWarpsM = kWideTileM / 16, kWideWarpsN = kLoraWarps / kWideWarpsM;

template <int kRanks, class F>
struct WideLora {
  static constexpr WideLoraSmem kSmem = wide_lora_smem(kRanks, sizeof(F) == 4);
};

// A CTA's part of the product.
struct WideLoraWork {
  int first_m, first_rank;
  int begin, end;  // in steps

  __device__ __forceinline__ WideLoraWork(const LoraProductArgs &args, int in_cluster, int ranks) {
    const int tile = static_cast<int>(blockIdx.x) >> args.cluster_log2;
    const int m_tile = tile / args.rank_chunks;
    const int steps = static_cast<int>((args.cols + kLoraStep - 1) / kLoraStep);
    first_m = m_tile * kWideTileM;
    first_rank = (tile - m_tile * args.rank_chunks) * ranks;
    begin = steps * in_cluster >> args.cluster_log2;
    end = steps * (in_cluster + 1) >> args.cluster_log2;
  }
};

// The stage that comes next, and the parity of its phase.
template <int kStages>
struct WideLoraState {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    stage = stage == kStages - 1 ? 0 : stage + 1;
    phase ^= stage == 0;
  }
};

// Issues the copies; one thread calls it.
template <class Box, class Wide>
__device__ __forceinline__ void load_steps(const LoraTmaArgs &args, const WideLoraWork &work,
                                           uint8_t *shared, uint64_t *full) {
  constexpr WideLoraSmem kSmem = Wide::kSmem;
  WideLoraState<kSmem.stages> state;
#pragma unroll 1
  for (int step = work.begin; step < work.end; ++step, state.advance()) {
    mbarrier_wait_parity(full + kSmem.stages + state.stage, state.phase ^ 1);
    uint8_t *const to = shared + state.stage * kSmem.stage_bytes;
    uint64_t *const barrier = full + state.stage;
    const int column = step * kLoraStep;
    mbarrier_arrive_expect_tx(barrier, kSmem.stage_bytes);
    tma_load_2d(to, &args.x_map, column * 2, work.first_m, barrier);
    Box::load(to + kSmem.x_bytes, &args.in_map, column, work.first_rank, barrier);
  }
}

// Multiplies; called by the warps that multiply, each with 16 rows of x and kRanks / kWideWarpsN
// ranks.
template <class T, class Box, class Wide, class Tile>
__device__ __forceinline__ void multiply_steps(const WideLoraWork &work, const uint8_t *shared,
                                               uint64_t *full, Tile &tile) {
  constexpr WideLoraSmem kSmem = Wide::kSmem;
  constexpr int kPairs = Tile::kRanks / 16, kSteps = kLoraStep / 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp % kWideWarpsM * 16 + lane % 16, first_pair = warp / kWideWarpsM * kPairs;
  WideLoraState<kSmem.stages> state;
#pragma unroll 1
  for (int step = work.begin; step < work.end; ++step, state.advance()) {
    const uint8_t *const stage = shared + state.stage * kSmem.stage_bytes;
    mbarrier_wait_parity(full + state.stage, state.phase);
    // All loads come before the first product; otherwise each product would wait for its own loads.
    uint32_t a[kSteps][4], b[kSteps][kPairs][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      ldmatrix_x4(a[k], stage + swizzled_chunk(row, k * 2 + lane / 16));
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
        Box::fragment(stage + kSmem.x_bytes, first_pair + i, k, b[k][i]);
    }
    mbarrier_arrive_warp(full + kSmem.stages + state.stage);
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        mma_m16n8k16(T{}, tile.sums[0][2 * i], a[k], b[k][i][0], b[k][i][1]);
        mma_m16n8k16(T{}, tile.sums[0][2 * i + 1], a[k], b[k][i][2], b[k][i][3]);
      }
  }
}

// x and `in` must be in a form that tensor maps take.
template <class Arch, class T, class F, bool kGradient, int kRanks>
__global__ void __launch_bounds__(kWideThreads, 2)
    lora_product_wide(const __grid_constant__ LoraTmaArgs args) {
  using Tile = LoraTile<1, kRanks / kWideWarpsN / 8>;
  using Box = LoraFactorBox<T, F, kGradient, kRanks>;
  using Wide = WideLora<kRanks, F>;
  constexpr WideLoraSmem kSmem = Wide::kSmem;
  extern __shared__ __align__(1024) uint8_t shared[];
  const LoraProductArgs &product = args.product;
  const int copy_cta = static_cast<int>(blockIdx.x) - product.product_ctas;
  if (copy_cta >= 0) {
    pdl_wait<Arch>();
    pdl_launch_dependents<Arch>();
    return copy_out<T, F>(product, copy_cta);
  }
  // The barriers of full stages, then those of empty ones.
  auto *const full = reinterpret_cast<uint64_t *>(shared + kSmem.barriers);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kSmem.stages; ++i) {
      mbarrier_init(full + i);
      mbarrier_init(full + kSmem.stages + i, kLoraWarps * kWarpArrivals);
    }
    fence_mbarrier_init();
  }
  // All CTAs of the cluster must run before one writes to another's shared memory.
  if (product.cluster_log2 > 0) cluster_sync_relaxed();
  __syncthreads();
  pdl_wait<Arch>();
  // This must not come earlier: the dependent waits for this kernel only before it reads this
  // kernel's output.
  pdl_launch_dependents<Arch>();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int in_cluster = rank_in_cluster<Arch>(product);
  const WideLoraWork work(product, in_cluster, kRanks);
  Tile tile;
  if (warp < kLoraWarps)
    multiply_steps<T, Box, Wide>(work, shared, full, tile);
  else if (lane == 0)
    load_steps<Box, Wide>(args, work, shared, full);
  __syncwarp();

  // Stores output `output` of a warp.
  const auto store = [&](int warp, int output, float sum) {
    store_product<T>(
        product, work.first_m + warp % kWideWarpsM * 16 + Tile::row(output),
        work.first_rank + warp / kWideWarpsM * Tile::kRanks + Tile::template rank<Box>(output),
        sum);
  };
  if (product.cluster_log2 == 0) {
#pragma unroll
    for (int i = 0; warp < kLoraWarps && i < Tile::kSums; ++i)
      store(warp, i * 32 + lane, tile.sum(i));
    return;
  }
  // Each CTA adds up a share of the vectors of four sums: [warp][four of a lane's sums][lane].
  constexpr int kLaneVectors = Tile::kSums / 4;
  auto *const received = reinterpret_cast<float4 *>(shared + kSmem.received);  // [CTA][share]
  const int share = kLoraWarps * kLaneVectors * 32 >> product.cluster_log2;
#pragma unroll
  for (int i = 0; warp < kLoraWarps && i < kLaneVectors; ++i) {
    const int vector = (warp * kLaneVectors + i) * 32 + lane, owner = vector / share;
    store_shared_cluster(
        map_shared_rank(received + in_cluster * share + vector - owner * share, owner),
        float4{tile.sum(4 * i), tile.sum(4 * i + 1), tile.sum(4 * i + 2), tile.sum(4 * i + 3)});
  }
  cluster_sync();
  for (int i = threadIdx.x; i < share; i += kWideThreads) {
    float sums[4] = {};
    for (int source = 0; source < 1 << product.cluster_log2; ++source) {
      const float4 part = received[source * share + i];
      sums[0] += part.x, sums[1] += part.y, sums[2] += part.z, sums[3] += part.w;
    }
    const int vector = in_cluster * share + i;
    const int of_warp = vector / 32 / kLaneVectors, index = vector / 32 % kLaneVectors * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) store(of_warp, (index + j) * 32 + vector % 32, sums[j]);
  }
}

}  // namespace
}  // namespace nf4::cuda
