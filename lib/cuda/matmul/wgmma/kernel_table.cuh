// Tables of wgmma kernels by configuration and dtype, for a kind of weight and a routing.
//
// `Kind` is Codebook (codebook.cuh), Transposed (transposed.cuh), E2m1Floats (e2m1.cuh) or Integers
// (int4.cuh). `Routing` is OneWeight, or Experts (matmul_grouped/wgmma_kernels.cu).
#pragma once

#include <utility>

#include "cuda/matmul/wgmma/kernel.cuh"
#include "cuda/matmul/wgmma/launch.hpp"

namespace nf4::cuda {
namespace {

struct OneWeight {
  static constexpr bool kExperts = false;
  static constexpr bool has(WeightKind kind, int config) { return has_kernel(kind, config); }

  template <class TileKind>
  using Routed = TileKind;
  template <class Kind, class Tile, int Config>
  using Scheduler =
      std::conditional_t<is_stream_k(Config), StreamKScheduler<Tile>, PersistentScheduler<Tile>>;
};

template <class Kind, class Routing>
struct WgmmaTableMaker {
  template <class T, bool Lora>
  using TileKind = typename Routing::template Routed<typename Kind::template TileKind<T, Lora>>;

  template <class T, int Config, bool Lora>
  static const void *kernel() {
    using Tile = CtaTile<Config, TileKind<T, Lora>>;
    return (const void *)matmul_wgmma<typename Kind::template Decode<T, Tile>, Tile,
                                      typename Routing::template Scheduler<Kind, Tile, Config>>;
  }

  template <int Config>
  static WgmmaKernel row() {
    if constexpr (!Routing::has(Kind::kKind, Config))
      return {};
    else {
      constexpr bool kLora = Kind::kLora && !Routing::kExperts;
      constexpr bool kPlainHasLora = kLora && !Kind::lora_apart(kMatmulConfigs[Config]);
      using Tile = CtaTile<Config, TileKind<__half, kLora>>;
      WgmmaKernel made{
          Tile::kThreads,
          SharedLayout<Tile>::kBytes,
          SharedLayout<Tile>::kXBoxRows,
          {kernel<__half, Config, kPlainHasLora>(), kernel<__nv_bfloat16, Config, kPlainHasLora>()},
          {}};
      if constexpr (kLora) {
        made.lora[0] = kernel<__half, Config, true>();
        made.lora[1] = kernel<__nv_bfloat16, Config, true>();
      }
      return made;
    }
  }

  template <int... Index>
  static WgmmaKernelsOf<Kind::kTable, Routing::kExperts> make(
      std::integer_sequence<int, Index...>) {
    return {{{row<kFirstWgmma + Index>()...}}};
  }
  static auto make() {
    return make(std::make_integer_sequence<int, kFirstMultistage - kFirstWgmma>());
  }
};

}  // namespace
}  // namespace nf4::cuda
