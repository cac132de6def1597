// Each expert's y = x W^T for experts with few rows and an integer weight, GPTQ or
// compressed-tensors: like skinny_kernel.cuh, with the warp tiles of matmul/skinny/int4_kernel.cuh.
//
// The bytes of the experts that have rows are the bound. docs/design/matmul-grouped.md has the
// experiments.
#pragma once

#include "cuda/matmul/skinny/int4_kernel.cuh"
#include "cuda/matmul_grouped/skinny_tiles.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class Layout, int kMaxM>
struct GroupedInt4Skinny : Int4Skinny<Arch, Layout, kMaxM> {
  using Args = GroupedInt4SkinnyArgs;
};

// Like int4_matmul_skinny, for a stack of experts.
template <class Arch, class T, class Layout, class WarpMma>
__global__ void __launch_bounds__(kSkinnyThreads, 1)
    int4_matmul_grouped_skinny(const __grid_constant__ GroupedInt4SkinnyArgs args) {
  constexpr int kMaxM = WarpMma::kMaxM;
  constexpr bool kAlongK = std::is_same_v<Layout, SkinnyGptq>;
  using Kind = GroupedInt4Skinny<Arch, Layout, kMaxM>;
  using TileGroup = TileGroups<GroupedInt4SkinnyArgs, kMaxM>;
  using TileIterator = GroupTileIterator<GroupedInt4SkinnyArgs, kMaxM, kSkinnyWarps, kAlongK>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const Int4MatmulArgs &matmul = args.matmul;
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
  const int n_warp = static_cast<int>(args.work.k_warps_divisor.divide(warp));
  const int first_k_tile = warp - n_warp * args.work.k_warps;
  const int first_tile = n_warp < args.work.n_warps ? n_warp : args.work.group_tiles;
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  const Routing<kMaxM> routing(args.groups);
  TileGroup group(args, routing);
  if (!group.is_valid()) return;

  WeightPipeline<Kind, TileIterator> pipeline(
      args, shared, warp, 0, TileIterator(args.work, group, first_tile, first_k_tile));
  Int4ScaleStage<Arch, Layout> scales(args, shared, Kind::kSmem.scale_barrier);
  pipeline.init();
  scales.init();
  WarpMma warp_mma;
  const auto x = [&] { return ChunkX<Int4MatmulArgs>{matmul, args.groups, group.chunk()}; };
  const auto load_scales = [&] { scales.load(group.row(), group.rows(), group.chunk().expert); };
  warp_mma.load_x(x(), first_k_tile);
  load_scales();
  pipeline.load_next();
  scales.publish(true);
#pragma unroll 1
  for (int stage = 1; stage < Kind::kSmem.stages; ++stage) pipeline.load_next();
  bool other_x = true;  // another chunk than in the previous group
#pragma unroll 1
  for (uint32_t phase = 0;; phase ^= 1) {
    const PartialSums<WarpMma> sums{0, group.tiles(),
                                    reinterpret_cast<float *>(shared + Kind::kSmem.partials)};
#pragma unroll 1
    for (int k_tile = first_k_tile; k_tile < args.work.k_tiles; k_tile += kSkinnyWarps) {
      const int next = k_tile + kSkinnyWarps;
      if (!WarpMma::kLoadsAhead && k_tile != first_k_tile) warp_mma.load_x(x(), k_tile);
      if (other_x) warp_mma.prepare_x(x(), k_tile);
      if (WarpMma::kLoadsAhead && next < args.work.k_tiles) warp_mma.load_x(x(), next);
      auto reader = scales.reader(k_tile, first_tile, WarpMma::row());
      float *partial = sums.of_warp(first_tile, warp);
#pragma unroll 1
      for (int tile = first_tile; tile < sums.end; tile += args.work.n_warps) {
        const auto find_scales = [&] {
          scales.wait(phase);
          const Int4Scales found = reader.get(matmul.weight);
          reader.advance(args.work.n_warps);
          return found;
        };
        warp_mma.add(pipeline.wait_next(), find_scales, k_tile != first_k_tile, partial);
        __syncwarp();  // all lanes have read it before the stage is overwritten
        pipeline.load_next();
        partial += args.work.n_warps * kSkinnyWarps * sums.kTilePartials;
      }
    }
    __syncthreads();
    // The next group's data is in flight while the sums of this group are added up.
    const TileGroup done = group;
    other_x = group.advance() || args.work.k_tiles > kSkinnyWarps;
    if (group.is_valid()) {
      if (other_x) warp_mma.load_x(x(), first_k_tile);
      load_scales();
    }
    store_group<T>(args, done, sums, 1.0f);
    if (!group.is_valid()) return;
    scales.publish(false);
  }
}

}  // namespace
}  // namespace nf4::cuda
