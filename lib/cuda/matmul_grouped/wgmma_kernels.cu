// The wgmma kernels of experts with many rows, for one kind of weight; compiled once for each kind,
// which meson names in NF4_WGMMA_KIND.
#include "cuda/matmul/wgmma/kernel_table.cuh"
#include "cuda/matmul/wgmma/kinds.cuh"
#include "cuda/matmul_grouped/wgmma_args.hpp"
#include "cuda/matmul_grouped/wgmma_scheduler.cuh"

namespace nf4::cuda {
namespace {

struct Experts {
  static constexpr bool kExperts = true;
  static constexpr bool has(WeightKind kind, int config) {
    return has_experts_kernel(kind, config);
  }

  template <class TileKind>
  using Routed = GroupedKind<TileKind>;
  template <class Kind, class Tile, int Config>
  using Scheduler = GroupedScheduler<Tile, Kind::kExpertsAlongK>;
};

}  // namespace

using Kernels = WgmmaKernelsOf<NF4_WGMMA_KIND::kTable, true>;

template <>
template <>
Kernels Kernels::make<NF4_FAMILY>() {
  return WgmmaTableMaker<NF4_WGMMA_KIND, Experts>::make();
}

}  // namespace nf4::cuda
