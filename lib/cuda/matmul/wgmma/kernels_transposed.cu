// The wgmma kernels of the gradient, which multiply with W^T of a weight with a codebook.
#include <utility>

#include "cuda/matmul/wgmma/kernel.cuh"
#include "cuda/matmul/wgmma/launch.hpp"
#include "cuda/matmul/wgmma/transposed.cuh"

namespace nf4::cuda {
namespace {

template <class T, int Config>
const void *kernel_of() {
  using Tile = CtaTile<Config, TransposedKind<true>>;
  using Scheduler =
      std::conditional_t<is_stream_k(Config), StreamKScheduler<Tile>, PersistentScheduler<Tile>>;
  return (const void *)matmul_wgmma<TransposedDecode<T>, Tile, Scheduler>;
}

template <int Config>
WgmmaKernel wgmma_kernel() {
  if constexpr (!has_grad_kernel(Config))
    return {};
  else {
    using Tile = CtaTile<Config, TransposedKind<true>>;
    return {Tile::kThreads,
            SharedLayout<Tile>::kBytes,
            SharedLayout<Tile>::kXBoxRows,
            {kernel_of<__half, Config>(), kernel_of<__nv_bfloat16, Config>()},
            {kernel_of<__half, Config>(), kernel_of<__nv_bfloat16, Config>()}};
  }
}

template <int... Index>
WgmmaKernels wgmma_kernels(std::integer_sequence<int, Index...>) {
  return {{wgmma_kernel<kFirstWgmma + Index>()...}};
}

}  // namespace

template <class Arch>
GradWgmmaKernels GradWgmmaKernels::make() {
  return {wgmma_kernels(std::make_integer_sequence<int, kMatmulConfigCount - kFirstWgmma>())};
}

template GradWgmmaKernels GradWgmmaKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
