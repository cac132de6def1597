// Weights with a codebook, for the wgmma kernels. A LUT decodes them.
#pragma once

#include <cstdint>

#include "cuda/arch.cuh"
#include "cuda/matmul/wgmma/args.hpp"
#include "cuda/matmul/wgmma/consumer.cuh"
#include "cuda/matmul/wgmma/launch.hpp"
#include "cuda/matmul/wgmma/scale_loader.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/weight/decode.cuh"
#include "cuda/weight/layout.cuh"

namespace nf4::cuda {
namespace {

// The decode policy for a codebook's codes; it depends on whether scales multiply sums or weights.
template <class T, ScaleOn>
struct CodebookDecode {
  using Type = LutEntries<T>;
};
template <>
struct CodebookDecode<__half, ScaleOn::kWeights> {
  using Type = LutScaledFp16;
};
template <>
struct CodebookDecode<__nv_bfloat16, ScaleOn::kWeights> {
  using Type = LutScaledBf16;
};

// With Lora, an adapter may be added.
template <bool Lora>
struct CodebookKind {
  using Args = WgmmaArgs;
  using Scale = float;
  template <int TileN>
  using Layout = RowPacked;
  template <class Tile>
  using Reader = WeightReader<Tile>;
  static constexpr ScaleOn scale_on(ScaleOn of_config) { return of_config; }

  static constexpr bool kGroups = false;
  static constexpr bool kGlobalScales = false;
  static constexpr bool kLora = Lora;
  static constexpr bool kSplitK = true;  // if the configuration has it
  static constexpr int kLutBytes = 65536;
  static constexpr int kScaleCodeBytes = 1024;
  // A K-tile of a tile with many rows of x takes long, and leaves little room.
  static constexpr int weight_stages(int tile_m, int tile_n) {
    return tile_m > 192 ? 2 : tile_m > 128 ? 3 : tile_n == 128 ? 6 : 5;
  }

  // The place of a row's scales in a stage, and the distance between those of a lane's first and
  // second row.
  static constexpr int scale_rows(int tile_n) { return tile_n; }
  template <class Tile>
  static __device__ __forceinline__ int scale_index(int row) {
    return row * 2;
  }
  template <class Tile>
  static constexpr int kScaleDistance = RowPacked::kRowDistance * 2;
  // The factor for sums.
  static __device__ __forceinline__ float sum_scale(float scale) { return scale; }

  // Builds the LUT. It reads only arguments while the predecessor may still write, and waits for
  // the predecessor before it reads a caller's codebook. Returns the unit of the sums.
  template <class Decode, class Tile>
  static __device__ __forceinline__ float begin_consumer(const Args &args,
                                                         SharedStorage<Tile> shared) {
    const float *const codebook =
        Tile::kScaleOn == ScaleOn::kSums ? args.matmul.weight.codebook : nullptr;
    if (codebook != nullptr) wait_for_inputs<CodebookKind<Lora>>(args);
    const float unit = Decode::template build<Tile::kConsumers>(args.decode, codebook, shared.base,
                                                                consumer_thread());
    wait_for_inputs<CodebookKind<Lora>>(args);
    pdl_launch_dependents<Sm90>();
    named_barrier_sync(1, Tile::kConsumers);
    return unit;
  }

  template <class Tile, class Scheduler>
  static __device__ __forceinline__ void load_scales(const typename Tile::Args &args,
                                                     SharedStorage<Tile> shared, int thread) {
    if (args.matmul.weight.nested_absmax != nullptr)
      nf4::cuda::load_scales<NestedScales, Tile, Scheduler>(args, shared, thread);
    else
      nf4::cuda::load_scales<FlatScales, Tile, Scheduler>(args, shared, thread);
  }
};

struct Codebook {
  static constexpr WgmmaTable kTable = WgmmaTable::kCodebook;
  static constexpr WeightKind kKind = WeightKind::kCodebook;
  static constexpr bool kExpertsAlongK = false;
  static constexpr bool kLora = true;
  // Up to 64 rows of x the code for an adapter costs products without one 3 to 6 %, else nothing.
  static constexpr bool lora_apart(const MatmulConfig &config) {
    return config.scale_on == ScaleOn::kSums;
  }

  template <class T, bool Lora>
  using TileKind = CodebookKind<Lora>;
  template <class T, class Tile>
  using Decode = typename CodebookDecode<T, Tile::kScaleOn>::Type;
};

}  // namespace
}  // namespace nf4::cuda
