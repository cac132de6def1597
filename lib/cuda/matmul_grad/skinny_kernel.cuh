// dX = dY W for few rows of dY: a skinny GEMM with mma.sync, split along the weight's rows.
//
// It is built like the strip kernels of integer weights (matmul/skinny/strip_kernel.cuh). A CTA has
// a strip of 256 columns of the weight. If there are few strips, a cluster shares its rows, and
// adds up through distributed shared memory in a fixed order. Cost: 0.516 bytes read per weight.
// For 4096 weights a warp takes 116 cycles of shared memory, 64 of them for look-ups, and 400
// instructions. docs/design/matmul-skinny.md has the experiments.
#pragma once

#include <cuda_runtime.h>

#include "cuda/matmul/skinny/strip_pipeline.cuh"
#include "cuda/matmul/skinny/strip_reduce.cuh"
#include "cuda/matmul_grad/skinny_mainloop.cuh"
#include "cuda/matmul_grad/skinny_scales.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

// Needs blocks of kGradBlocksize elements, with whole strips in a row; the format's own codebook;
// 16-byte aligned packed and rows of x; and absmax aligned to two of its elements.
template <class Arch, class T, class Scales, int MTiles>
__global__ void __launch_bounds__(kStripThreads, 1)
    matmul_grad_skinny(const __grid_constant__ GradStripArgs args) {
  constexpr int kMaxM = 8 * MTiles;
  constexpr GradStripSmem kSmem = kGradStripSmem<kMaxM>;
  constexpr StripSmem kStrip = kStripSmem<kGradWarpsN, kMaxM>;
  // Scales are written a K-tile ahead, when other warps may still read those of this one.
  static_assert(kStrip.stages >= 2);
  extern __shared__ __align__(1024) uint8_t shared[];
  const WeightView &weight = args.matmul.weight;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  const int n_warp = warp % kGradWarpsN, k_warp = warp / kGradWarpsN;
  const int strip = static_cast<int>(blockIdx.x) / args.cluster;
  const int first_column = strip * kStripRows<kGradWarpsN>;
  const int part = (static_cast<int>(blockIdx.x) - strip * args.cluster) * kGradWarpsK + k_warp;
  const int parts = args.cluster * kGradWarpsK;
  const int begin = part * args.k_tiles / parts;
  const int k_tiles = (part + 1) * args.k_tiles / parts - begin;
  StripPipeline<GradStripArgs, StripAwq<kGradWarpsN>, kMaxM, kGradWarpsN> pipeline(
      args, shared + kSmem.strip, k_warp, first_column, begin, k_tiles, n_warp == 0);
  GradScales<Scales> scales(weight, strip, n_warp, begin);
  if (warp == 0) prefetch_tensor_map(&args.x);
  pipeline.prefetch();
  scales.prefetch(weight);
  pipeline.init();
  fill_lut<4, kStripThreads>(shared, static_cast<int>(threadIdx.x),
                             uint32_t{args.codebook.entries[threadIdx.x % kCodebookSize]},
                             pack_entries);
  pdl_wait<Arch>();
  // The small loads come before all but the first K-tile, which would delay them.
  pipeline.start(0, 1);
  pdl_launch_dependents<Arch>();
  const auto first_scales = scales.fetch_next(weight);
  auto next_scales = scales.fetch_next(weight);
  ScaleTable<Scales> table(reinterpret_cast<float *>(shared + kSmem.scale_code));
  table.template load_async<LoadGlobal, kStripThreads>(weight);
  pipeline.start(1);
  if (args.cluster > 1) cluster_arrive_relaxed();
  cp_async_wait_all();
  __syncthreads();

  // Scales are written a K-tile ahead and fetched another one ahead.
  float *const stage_scales =
      reinterpret_cast<float *>(shared + kSmem.scales) + k_warp * kStrip.stages * kGradStageScales;
  scales.store(first_scales, table, stage_scales);
  pipeline.written(0);
  const GradMainloop<T, MTiles> mainloop(shared, n_warp);
  float sums[kRowTiles][MTiles][4] = {};
#pragma unroll 1
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    const uint8_t *const stage = pipeline.wait();
    mainloop.add(stage, stage + kStrip.weight_bytes,
                 stage_scales + pipeline.stage() * kGradStageScales + n_warp * kStripK, sums);
    scales.store(next_scales, table, stage_scales + pipeline.next_stage() * kGradStageScales);
    pipeline.written(pipeline.next_stage());
    next_scales = scales.fetch_next(weight);
    pipeline.release(k_tile);
  }
  if (args.cluster > 1) cluster_wait();  // all of them have started
  const float unit = SplitUnit::kToOne * args.codebook.unit;
#pragma unroll
  for (int i = 0; i < kRowTiles * MTiles * 4; ++i)
    sums[i / (MTiles * 4)][i / 4 % MTiles][i % 4] *= unit;
  reduce_strip<T, kGradWarpsN, MTiles, true>(args, shared + kSmem.strip, first_column, n_warp,
                                             k_warp, sums);
}

}  // namespace
}  // namespace nf4::cuda
