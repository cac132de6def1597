// dX = dY W for few rows of dY: a skinny GEMM by mma.sync, split along the weight's rows.
//
// As the strip kernels of integer weights (matmul/skinny/strip_kernel.cuh): a CTA has a strip of
// 256 columns of the weight; where strips are few, a cluster shares its rows, and adds up through
// distributed shared memory in a fixed order. 0.516 bytes a weight. For 4096 weights a warp takes
// 116 cycles of shared memory, of which 64 are look-ups, and 380 instructions.
// docs/design/matmul-skinny.md has the experiments.
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

// Blocks of at least kStripWarpRows elements, of which cols is a multiple; the format's own
// codebook; 16-byte aligned packed and rows of x.
template <class Arch, class T, class Scales, int MTiles>
__global__ void __launch_bounds__(kStripThreads, 1)
    matmul_grad_skinny(const __grid_constant__ GradStripArgs args) {
  constexpr int kMaxM = 8 * MTiles;
  constexpr GradStripSmem kSmem = kGradStripSmem<kMaxM>;
  constexpr StripSmem kStrip = kStripSmem<kGradWarpsN, kMaxM>;
  // Scales are written a K-tile ahead, when other warps may still read those of the last one.
  static_assert(kStrip.stages >= 3);
  extern __shared__ __align__(1024) uint8_t shared[];
  const WeightView &weight = args.matmul.weight;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  const int n_warp = warp % kGradWarpsN, k_warp = warp / kGradWarpsN;
  const int strip = static_cast<int>(blockIdx.x) / args.cluster;
  const int first_column = strip * kStripRows<kGradWarpsN>;
  const int part = (static_cast<int>(blockIdx.x) - strip * args.cluster) * kGradWarpsK + k_warp;
  const int parts = args.cluster * kGradWarpsK;
  const int begin = part * args.k_tiles / parts, end = (part + 1) * args.k_tiles / parts;
  StripPipeline<GradStripArgs, StripAwq<kGradWarpsN>, kMaxM, kGradWarpsN> pipeline(
      args, shared + kSmem.strip, k_warp, first_column, begin, end - begin, n_warp == 0);
  pipeline.prefetch();
  pipeline.init();
  pdl_wait<Arch>();
  pipeline.start();
  pdl_launch_dependents<Arch>();

  GradScales<Scales> scales(weight, first_column, n_warp);
  scales.fetch(weight, begin);
  ScaleTable<Scales> table(reinterpret_cast<float *>(shared + kSmem.scale_code));
  table.template load<LoadGlobal, kStripThreads>(weight);
  fill_lut<4, kStripThreads>(shared, static_cast<int>(threadIdx.x),
                             uint32_t{args.codebook.entries[threadIdx.x % kCodebookSize]},
                             pack_entries);
  if (args.cluster > 1) cluster_sync_relaxed();  // all of them have started
  __syncthreads();

  float *const stage_scales =
      reinterpret_cast<float *>(shared + kSmem.scales) + k_warp * kStrip.stages * kGradStageScales;
  // Of the K-tile after the next `ahead`; then fetches the one after it.
  const auto write_scales = [&](int k_tile, int ahead) {
    const int stage = pipeline.stage_ahead(ahead);
    scales.store(table, args.codebook.unit, stage_scales + stage * kGradStageScales);
    pipeline.written(stage);
    scales.fetch(weight, k_tile + 1);
  };
  if (begin < end) write_scales(begin, 0);
  const GradMainloop<T, MTiles> mainloop(shared, n_warp);
  float sums[kRowTiles][MTiles][4] = {};
#pragma unroll 1
  for (int k_tile = begin; k_tile < end; ++k_tile) {
    if (k_tile + 1 < end) write_scales(k_tile + 1, 1);
    const uint8_t *const stage = pipeline.wait();
    mainloop.add(stage, stage + kStrip.weight_bytes,
                 stage_scales + pipeline.stage() * kGradStageScales + n_warp * kStripK, sums);
    pipeline.release(k_tile - begin);
  }
#pragma unroll
  for (int i = 0; i < kRowTiles * MTiles * 4; ++i)
    sums[i / (MTiles * 4)][i / 4 % MTiles][i % 4] *= SplitUnit::kToOne;
  reduce_strip<T, kGradWarpsN>(args, shared + kSmem.strip, first_column, n_warp, k_warp, sums);
}

}  // namespace
}  // namespace nf4::cuda
