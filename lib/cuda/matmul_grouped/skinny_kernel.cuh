// Each expert's y = x W^T for experts with few rows and a weight with a codebook: the skinny
// kernel's warp tiles and pipelines, persistent over all experts that have rows. A chunk has up to
// kMaxM rows of x. An expert with more rows has several chunks, and its weight is read again,
// mostly from L2.
//
// The bytes of the experts that have rows are the bound, as in matmul/skinny/kernel.cuh. Finding
// the experts takes one more round trip to L2. docs/design/matmul-grouped.md has the experiments.
#pragma once

#include "cuda/matmul/skinny/kernel.cuh"
#include "cuda/matmul_grouped/skinny_tiles.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class WarpMma>
struct GroupedSkinny : CodebookSkinny<Arch, WarpMma> {
  using Args = GroupedSkinnyArgs;
};

// Like matmul_skinny, for a stack of experts.
template <class Arch, class T, class Scales, class WarpMma>
__global__ void __launch_bounds__(32 * kWarpsOf<WarpMma>, 1)
    matmul_grouped_skinny(const __grid_constant__ GroupedSkinnyArgs args) {
  constexpr int kWarps = kWarpsOf<WarpMma>, kThreads = 32 * kWarps, kMaxM = WarpMma::kMaxM;
  constexpr bool kLoadsAhead = WarpMma::kLoadsAhead;
  using Kind = GroupedSkinny<Arch, WarpMma>;
  using Lut = typename WarpMma::Lut;
  using TileIterator = GroupTileIterator<GroupedSkinnyArgs, kMaxM, kWarps>;
  using TileGroup = TileGroups<GroupedSkinnyArgs, kMaxM>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const MatmulArgs &matmul = args.matmul;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  const int n_warp = static_cast<int>(args.work.k_warps_divisor.divide(warp));
  const int first_k_tile = warp - n_warp * args.work.k_warps;
  const int first_tile = n_warp < args.work.n_warps ? n_warp : args.work.group_tiles;
  // This reads only arguments while the predecessor may still write, unless there is a caller's
  // codebook.
  float unit = 1;
  const bool own_codebook = matmul.weight.codebook == nullptr;
  if (own_codebook) unit = build_lut<T, Scales, Lut, kThreads>(args, 0.0f, shared);
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  const Routing<kMaxM> routing(args.groups);
  TileGroup group(args, routing);
  if (!group.is_valid()) return;

  WeightPipeline<Kind, TileIterator> pipeline(
      args, shared, warp, 0, TileIterator(args.work, group, first_tile, first_k_tile));
  ScaleStage<Arch, Scales, kThreads, int64_t> scales(args, shared, Kind::kSmem.scale_barrier);
  pipeline.init();
  scales.init();
  float offset = 0;
  if constexpr (Scales::kNested) offset = *matmul.weight.nested_offset;
  WarpMma warp_mma;
  warp_mma.load_x(ChunkX<MatmulArgs>{matmul, args.groups, group.chunk()}, first_k_tile);
  scales.load_scale_code();
  scales.load(group.weight_row(), group.rows());
  pipeline.load_next();
  if (!own_codebook) unit = build_lut<T, Scales, Lut, kThreads>(args, 0.0f, shared);
  scales.publish(true);
#pragma unroll 1
  for (int stage = 1; stage < Kind::kSmem.stages; ++stage) pipeline.load_next();

  constexpr bool kKeep = WarpMma::kKeepsLane;
  const Lut lut(shared, keep_in_register<kKeep>(threadIdx.x % 32 * Lut::kLaneBytes));
  const int thread_in_group = static_cast<int>(keep_in_register<kKeep>(threadIdx.x % 4));
  bool other_x = true;  // another chunk than in the previous group, or several K-tiles
#pragma unroll 1
  for (uint32_t phase = 0;; phase ^= 1) {
    const PartialSums<WarpMma> sums{0, group.tiles(),
                                    reinterpret_cast<float *>(shared + Kind::kSmem.partials)};
#pragma unroll 1
    for (int k_tile = first_k_tile; k_tile < args.work.k_tiles; k_tile += kWarps) {
      const int next = k_tile + kWarps;
      if (!kLoadsAhead && k_tile != first_k_tile)
        warp_mma.load_x(ChunkX<MatmulArgs>{matmul, args.groups, group.chunk()}, k_tile);
      if (other_x) warp_mma.prepare_x();
      if (kLoadsAhead && next < args.work.k_tiles)
        warp_mma.load_x(ChunkX<MatmulArgs>{matmul, args.groups, group.chunk()}, next);
      auto cursor = scales.cursor(k_tile, first_tile, WarpMma::row(0), thread_in_group);
      float *partial = sums.of_warp(first_tile, warp);
#pragma unroll 1
      for (int tile = first_tile; tile < sums.end; tile += args.work.n_warps) {
        const auto find_scales = [&] {
          scales.wait(phase);
          const auto found = scales.get(cursor, thread_in_group, offset);
          scales.advance(cursor);
          return found;
        };
        warp_mma.add(pipeline.wait_next(), lut, find_scales, k_tile != first_k_tile, partial);
        __syncwarp();  // all lanes have read it before the stage is overwritten
        pipeline.load_next();
        partial += args.work.n_warps * kWarps * sums.kTilePartials;
      }
    }
    __syncthreads();
    // The next group's data is in flight while the sums of this group are added up.
    const TileGroup done = group;
    other_x = group.advance() || args.work.k_tiles > kWarps;
    if (group.is_valid()) {
      if (other_x)
        warp_mma.load_x(ChunkX<MatmulArgs>{matmul, args.groups, group.chunk()}, first_k_tile);
      scales.load(group.weight_row(), group.rows());
    }
    store_group<T>(args, done, sums, unit);
    if (!group.is_valid()) return;
    scales.publish(false);
  }
}

}  // namespace
}  // namespace nf4::cuda
