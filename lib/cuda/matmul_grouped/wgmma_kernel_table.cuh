// Tables of grouped wgmma kernels.
#pragma once

#include <utility>

#include "cuda/matmul/wgmma/kernel.cuh"
#include "cuda/matmul_grouped/wgmma_args.hpp"
#include "cuda/matmul_grouped/wgmma_configs.hpp"
#include "cuda/matmul_grouped/wgmma_scheduler.cuh"

namespace nf4::cuda {
namespace {

// `Of` describes a kind of weight W, like GroupedCodebook.
template <class Of, class T, int Config>
const void *grouped_kernel_of() {
  using Tile = CtaTile<Config, GroupedKind<typename Of::template Kind<T>>>;
  return (const void *)matmul_wgmma<typename Of::template Decode<T, Tile>, Tile,
                                    GroupedScheduler<Tile, Of::kAlongK>>;
}

template <class Of, int Config>
WgmmaKernel grouped_kernel() {
  if constexpr (!has_grouped_wgmma<typename Of::W>(Config))
    return {};
  else {
    using Tile = CtaTile<Config, GroupedKind<typename Of::template Kind<__half>>>;
    return {
        Tile::kThreads,
        SharedLayout<Tile>::kBytes,
        SharedLayout<Tile>::kXBoxRows,
        {grouped_kernel_of<Of, __half, Config>(), grouped_kernel_of<Of, __nv_bfloat16, Config>()},
        {}};
  }
}

template <class Of, int... Index>
WgmmaKernels grouped_kernels(std::integer_sequence<int, Index...>) {
  return {{grouped_kernel<Of, kFirstWgmma + Index>()...}};
}
template <class Of>
WgmmaKernels grouped_kernels() {
  return grouped_kernels<Of>(std::make_integer_sequence<int, kMatmulConfigCount - kFirstWgmma>());
}

}  // namespace
}  // namespace nf4::cuda
