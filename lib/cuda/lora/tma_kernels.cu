// Instantiates the TMA kernels of an adapter's product with x; compiled for Hopper alone.
#include "cuda/lora/persistent.cuh"
#include "cuda/lora/tma_kernels.hpp"
#include "cuda/lora/wide.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T, class F, bool kGradient>
void set_kernels(const void *(&persistent)[2], const void *(&wide)[2]) {
  persistent[0] = (const void *)lora_product_persistent<Arch, T, F, kGradient, kPersistentTileM[0]>;
  persistent[1] = (const void *)lora_product_persistent<Arch, T, F, kGradient, kPersistentTileM[1]>;
  wide[0] = (const void *)lora_product_wide<Arch, T, F, kGradient, kWideRanks[0]>;
  wide[1] = (const void *)lora_product_wide<Arch, T, F, kGradient, kWideRanks[1]>;
}

template <class Arch, class T, class F>
void set_kernels(const void *(&persistent)[2][2], const void *(&wide)[2][2]) {
  set_kernels<Arch, T, F, false>(persistent[0], wide[0]);
  set_kernels<Arch, T, F, true>(persistent[1], wide[1]);
}

}  // namespace

template <class Arch>
LoraTmaKernels LoraTmaKernels::make() {
  LoraTmaKernels kernels{};
  set_kernels<Arch, __half, __half>(kernels.persistent[0][0], kernels.wide[0][0]);
  set_kernels<Arch, __half, float>(kernels.persistent[0][1], kernels.wide[0][1]);
  set_kernels<Arch, __nv_bfloat16, __nv_bfloat16>(kernels.persistent[1][0], kernels.wide[1][0]);
  set_kernels<Arch, __nv_bfloat16, float>(kernels.persistent[1][1], kernels.wide[1][1]);
  return kernels;
}

template LoraTmaKernels LoraTmaKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
