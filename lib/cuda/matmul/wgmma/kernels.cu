// The wgmma kernels of a weight with a codebook: one for each configuration and dtype.
#include <utility>

#include "cuda/matmul/wgmma/codebook.cuh"
#include "cuda/matmul/wgmma/decode_of.cuh"
#include "cuda/matmul/wgmma/kernel.cuh"
#include "cuda/matmul/wgmma/launch.hpp"

namespace nf4::cuda {
namespace {

template <class T, int Config, bool Lora>
const void *kernel_of() {
  using Tile = CtaTile<Config, CodebookKind<Lora>>;
  using Decode = typename CodebookDecode<T, Tile::kScaleOn>::Type;
  using Scheduler =
      std::conditional_t<is_stream_k(Config), StreamKScheduler<Tile>, PersistentScheduler<Tile>>;
  return (const void *)matmul_wgmma<Decode, Tile, Scheduler>;
}

// Up to 64 rows of x, the code for an adapter costs products without one 3 to 6 %, with more rows
// nothing.
template <int Config>
WgmmaKernel wgmma_kernel() {
  if constexpr (!has_codebook_kernel(Config))
    return {};
  else {
    constexpr bool kApart = kMatmulConfigs[Config].scale_on == ScaleOn::kSums;
    using Tile = CtaTile<Config, CodebookKind<true>>;
    return {Tile::kThreads,
            SharedLayout<Tile>::kBytes,
            SharedLayout<Tile>::kXBoxRows,
            {kernel_of<__half, Config, !kApart>(), kernel_of<__nv_bfloat16, Config, !kApart>()},
            {kernel_of<__half, Config, true>(), kernel_of<__nv_bfloat16, Config, true>()}};
  }
}

template <int... Index>
WgmmaKernels wgmma_kernels(std::integer_sequence<int, Index...>) {
  return {{wgmma_kernel<kFirstWgmma + Index>()...}};
}

}  // namespace

template <class Arch>
WgmmaKernels WgmmaKernels::make() {
  return wgmma_kernels(std::make_integer_sequence<int, kMatmulConfigCount - kFirstWgmma>());
}

template WgmmaKernels WgmmaKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
