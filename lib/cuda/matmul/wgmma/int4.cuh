// Integer weights, for the wgmma kernels. Arithmetic decodes them, so that the shared memory of a
// LUT serves more stages.
#pragma once

#include <cstdint>

#include "cuda/arch.cuh"
#include "cuda/matmul/wgmma/args.hpp"
#include "cuda/matmul/wgmma/consumer.cuh"
#include "cuda/matmul/wgmma/int4_scale_loader.cuh"
#include "cuda/matmul/wgmma/launch.hpp"
#include "cuda/ptx/pdl.cuh"
#include "cuda/weight/int4_decode.cuh"
#include "cuda/weight/int4_layout.cuh"

namespace nf4::cuda {
namespace {

// T is the type of x.
template <class T, nf4_int4_layout kLayout>
struct Int4Kind {
  using Args = Int4WgmmaArgs;
  using Scale = Int4Scale;
  template <int TileN>
  using Layout = typename Int4LayoutOf<kLayout, TileN>::Type;
  template <class Tile>
  using Reader = WeightReader<Tile>;
  static constexpr ScaleOn scale_on(ScaleOn of_config) { return of_config; }

  static constexpr bool kAwq = kLayout == NF4_INT4_AWQ;
  template <class Tile>
  static constexpr int kAwqDistance = Tile::kTileN / 4 + 2;

  static constexpr bool kGroups = true;  // groups of steps share scales
  static constexpr bool kGlobalScales = false;
  static constexpr bool kLora = false;
  static constexpr bool kSplitK = true;
  static constexpr int kLutBytes = 0;
  static constexpr int kScaleCodeBytes = 0;
  static constexpr int weight_stages(int tile_m, int) { return tile_m > 192 ? 4 : 6; }

  // The place of a row's scales in a stage, and the distance between those of a lane's first and
  // second row. The rows that a warp reads lie side by side, and so do most rows that the loader's
  // threads store.
  static constexpr int scale_rows(int tile_n) { return tile_n + (kAwq ? 8 : 0); }
  template <class Tile>
  static __device__ __forceinline__ int scale_index(int row) {
    constexpr int kRows = Int4ScaleLoader<T, Tile>::kRows;
    if constexpr (kAwq)
      return (row / 2 % 4 * kAwqDistance<Tile> + row / 8 * 2 + row % 2) * 2;
    else
      return (row % kRows * kScaleThreads + row / kRows) * 2;
  }
  template <class Tile>
  static constexpr int kScaleDistance =
      kAwq ? kAwqDistance<Tile> * 2
      : Tile::Layout::kRowDistance == 1
          ? kScaleThreads * 2
          : Tile::Layout::kRowDistance / Int4ScaleLoader<T, Tile>::kRows * 2;

  // The factor for sums.
  static __device__ __forceinline__ float sum_scale(const Int4Scale &scale) {
    return __uint_as_float(scale.scale);
  }

  // Returns the unit of the sums.
  template <class Decode, class Tile>
  static __device__ __forceinline__ float begin_consumer(const Args &, SharedStorage<Tile>) {
    pdl_wait<Sm90>();
    pdl_launch_dependents<Sm90>();
    return Decode::kUnit;
  }

  template <class Tile, class Scheduler>
  static __device__ __forceinline__ void load_scales(const typename Tile::Args &args,
                                                     SharedStorage<Tile> shared, int thread) {
    Int4ScaleLoader<T, Tile> loader(args, shared, thread);
    for_each_work_tile<Scheduler>(args, [&](const Scheduler &scheduler) {
      const WorkTile work = scheduler.work_tile();
      loader.load(work, scheduler.n_end(work), scheduler.expert_along_k());
    });
  }
};

template <class T, class Tile>
struct Int4DecodeOf {
  using Nibbles = typename NibblesOf<T, Tile::Layout::kLayout>::Type;
  using Type = std::conditional_t<Tile::kScaleOn == ScaleOn::kSums, Int4Codes<T, Nibbles>,
                                  Int4Scaled<T, Nibbles>>;
};

template <nf4_int4_layout Layout, WgmmaTable Table>
struct Integers {
  static constexpr WgmmaTable kTable = Table;
  static constexpr WeightKind kKind = WeightKind::kInt4;
  static constexpr bool kExpertsAlongK = Layout != NF4_INT4_COMPRESSED_TENSORS;
  static constexpr bool kLora = false;
  static constexpr bool lora_apart(const MatmulConfig &) { return false; }

  template <class T, bool>
  using TileKind = Int4Kind<T, Layout>;
  template <class T, class Tile>
  using Decode = typename Int4DecodeOf<T, Tile>::Type;
};

}  // namespace
}  // namespace nf4::cuda
