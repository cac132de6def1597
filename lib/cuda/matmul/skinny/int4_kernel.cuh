// y = x W^T for up to 16 rows of x and a weight of compressed-tensors or GPTQ: like kernel.cuh,
// without a LUT. takes_strips() says where GPTQ uses strip_kernel.cuh, as AWQ always does.
//
// Cost: 0.5 bytes read per weight and 2.5 per group; memory bounds it. docs/design/matmul-skinny.md
// has the experiments.
#pragma once

#include <cuda_runtime.h>

#include "cuda/matmul/skinny/epilogue.cuh"
#include "cuda/matmul/skinny/int4_mainloop.cuh"
#include "cuda/matmul/skinny/int4_scale_stage.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

template <class Arch_, class Layout, int kMaxM>
struct Int4Skinny {
  using Arch = Arch_;
  using Args = Int4SkinnyArgs;
  using Codes = Layout;
  static constexpr int kWarps = kSkinnyWarps;
  static constexpr SkinnySmem kSmem = int4_skinny_smem(kMaxM);
};

// group_size is a multiple of kScaleK; the weight, the scales and rows of x are 16-byte aligned.
template <class Arch, class T, class Layout, class WarpMma>
__global__ void __launch_bounds__(kSkinnyThreads, 1)
    int4_matmul_skinny(const __grid_constant__ Int4SkinnyArgs args) {
  using Kind = Int4Skinny<Arch, Layout, WarpMma::kMaxM>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const Int4MatmulArgs &matmul = args.matmul;
  const CtaRows rows(args.work, static_cast<int>(blockIdx.x), args.unit_rows,
                     static_cast<int>(matmul.weight.rows));
  const int tiles = rows.tiles();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  const int n_warp = static_cast<int>(args.work.k_warps_divisor.divide(warp));
  const int first_k_tile = warp - n_warp * args.work.k_warps;
  const int first_tile = n_warp < args.work.n_warps ? n_warp : tiles;
  WeightPipeline<Kind> pipeline(args, shared, warp, rows.first,
                                WarpTileIterator(args.work, tiles, first_tile, first_k_tile));
  Int4ScaleStage<Arch, Layout> scales(args, shared, Kind::kSmem.scale_barrier);
  pipeline.prefetch();
  pipeline.init();
  scales.init();
  pdl_wait<Arch>();
  WarpMma warp_mma;
  warp_mma.load_x(matmul, first_k_tile);
  uint32_t phase = 0;
#pragma unroll 1
  for (int first = 0; first < tiles; first += args.work.group_tiles, phase ^= 1) {
    const PartialSums<WarpMma> group{first, min(first + args.work.group_tiles, tiles),
                                     reinterpret_cast<float *>(shared + Kind::kSmem.partials)};
    const int first_row = first * kWarpTileN;
    scales.load(rows.first + first_row,
                min(args.work.group_tiles * kWarpTileN, rows.count - first_row));
    if (first == 0) {
      pipeline.load_next();
      pdl_launch_dependents<Arch>();
    }
    scales.publish(first == 0);
#pragma unroll 1
    for (int stage = 1; stage < Kind::kSmem.stages && first == 0; ++stage) pipeline.load_next();
    // This is done now, while the first tile is in flight, and not when the last sums are complete.
    Epilogue<T, WarpMma> epilogue(args, rows, group, threadIdx.x);
#pragma unroll 1
    for (int k_tile = first_k_tile; k_tile < args.work.k_tiles; k_tile += kSkinnyWarps) {
      if (!WarpMma::kLoadsAhead && (k_tile != first_k_tile || first != 0))
        warp_mma.load_x(matmul, k_tile);
      warp_mma.prepare_x(matmul, k_tile);
      if (WarpMma::kLoadsAhead) {
        const int next = k_tile + kSkinnyWarps;
        if (next < args.work.k_tiles || group.end < tiles)
          warp_mma.load_x(matmul, next < args.work.k_tiles ? next : first_k_tile);
      }
      auto reader = scales.reader(k_tile, first_tile, WarpMma::row());
      float *partial = group.of_warp(first_tile, warp);
#pragma unroll 1
      for (int tile = first_tile; first + tile < group.end; tile += args.work.n_warps) {
        const auto find_scales = [&] {
          scales.wait(phase);
          const Int4Scales found = reader.get(matmul.weight);
          reader.advance(args.work.n_warps);
          return found;
        };
        warp_mma.add(pipeline.wait_next(), find_scales, k_tile != first_k_tile, partial);
        __syncwarp();  // all lanes have read it before the stage is overwritten
        pipeline.load_next();
        partial += args.work.n_warps * kSkinnyWarps * group.kTilePartials;
      }
    }
    __syncthreads();
    const uint32_t outputs = (group.end - group.first) * group.kTilePartials;
    for (uint32_t i = threadIdx.x; i < outputs;) {
      epilogue.store(args.work.k_warps, 1.0f);
      i += kSkinnyThreads;
      if (i < outputs) epilogue = Epilogue<T, WarpMma>(args, rows, group, i);
    }
    if (group.end < tiles) __syncthreads();
  }
}

}  // namespace
}  // namespace nf4::cuda
