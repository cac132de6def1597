// The wgmma kernels of integer weights in one layout: one for each configuration and dtype.
#pragma once

#include <utility>

#include "cuda/matmul/wgmma/int4.cuh"
#include "cuda/matmul/wgmma/kernel.cuh"
#include "cuda/matmul/wgmma/launch.hpp"

namespace nf4::cuda {
namespace {

template <class T, class Tile>
struct Int4DecodeOf {
  using Nibbles = typename NibblesOf<T, Tile::Layout::kLayout>::Type;
  using Type = std::conditional_t<Tile::kScaleOn == ScaleOn::kSums, Int4Codes<T, Nibbles>,
                                  Int4Scaled<T, Nibbles>>;
};

template <class T, nf4_int4_layout Layout, int Config>
const void *int4_kernel_of() {
  using Tile = CtaTile<Config, Int4Kind<T, Layout>>;
  using Decode = typename Int4DecodeOf<T, Tile>::Type;
  using Scheduler =
      std::conditional_t<is_stream_k(Config), StreamKScheduler<Tile>, PersistentScheduler<Tile>>;
  return (const void *)matmul_wgmma<Decode, Tile, Scheduler>;
}

template <nf4_int4_layout Layout, int Config>
WgmmaKernel int4_kernel() {
  if constexpr (!has_int4_kernel(Config))
    return {};
  else {
    using Tile = CtaTile<Config, Int4Kind<__half, Layout>>;
    return {
        Tile::kThreads,
        SharedLayout<Tile>::kBytes,
        SharedLayout<Tile>::kXBoxRows,
        {int4_kernel_of<__half, Layout, Config>(), int4_kernel_of<__nv_bfloat16, Layout, Config>()},
        {}};
  }
}

template <nf4_int4_layout Layout, int... Index>
WgmmaKernels int4_kernels(std::integer_sequence<int, Index...>) {
  return {{int4_kernel<Layout, kFirstWgmma + Index>()...}};
}

}  // namespace

template <nf4_int4_layout Layout>
template <class Arch>
Int4WgmmaKernels<Layout> Int4WgmmaKernels<Layout>::make() {
  return {
      int4_kernels<Layout>(std::make_integer_sequence<int, kMatmulConfigCount - kFirstWgmma>())};
}

}  // namespace nf4::cuda
