// The grouped wgmma kernels of a weight with a codebook: Hopper's, for experts with many rows.
#include <utility>

#include "cuda/matmul/wgmma/decode_of.cuh"
#include "cuda/matmul/wgmma/kernel.cuh"
#include "cuda/matmul_grouped/gather.cuh"
#include "cuda/matmul_grouped/wgmma_args.hpp"
#include "cuda/matmul_grouped/wgmma_scheduler.cuh"

namespace nf4::cuda {
namespace {

template <class T, int Config>
const void *kernel_of() {
  using Tile = CtaTile<Config, GroupedKind>;
  using Decode = typename CodebookDecode<T, Tile::kScaleOn>::Type;
  return (const void *)matmul_wgmma<Decode, Tile, GroupedScheduler<Tile>>;
}

template <int Config>
GroupedWgmmaKernel wgmma_kernel() {
  using Tile = CtaTile<Config, GroupedKind>;
  return {Tile::kThreads,
          SharedLayout<Tile>::kBytes,
          SharedLayout<Tile>::kXBoxRows,
          {kernel_of<__half, Config>(), kernel_of<__nv_bfloat16, Config>()}};
}

template <int... Index>
GroupedWgmmaKernels wgmma_kernels(std::integer_sequence<int, Index...>) {
  return {{wgmma_kernel<kGroupedWgmmaConfigs[Index]>()...}, (const void *)gather_rows<Sm90>};
}

}  // namespace

template <class Arch>
GroupedWgmmaKernels GroupedWgmmaKernels::make() {
  return wgmma_kernels(std::make_integer_sequence<int, kGroupedWgmmaCount>());
}

template GroupedWgmmaKernels GroupedWgmmaKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
