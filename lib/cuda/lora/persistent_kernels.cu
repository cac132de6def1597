// Instantiates the kernels by TMA of one GPU family; compiled once for each.
#include "cuda/lora/persistent.cuh"
#include "cuda/lora/persistent_kernels.hpp"
#include "cuda/lora/wide.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T, class F, bool kGradient>
void set_kernels(const void *(&of)[2], const void *(&wide)[2]) {
  of[0] = (const void *)lora_product_persistent<Arch, T, F, kGradient, kPersistentTileM[0]>;
  of[1] = (const void *)lora_product_persistent<Arch, T, F, kGradient, kPersistentTileM[1]>;
  wide[0] = (const void *)lora_product_wide<Arch, T, F, kGradient, kWideRanks[0]>;
  wide[1] = (const void *)lora_product_wide<Arch, T, F, kGradient, kWideRanks[1]>;
}

template <class Arch, class T, class F>
void set_kernels(const void *(&of)[2][2], const void *(&wide)[2][2]) {
  set_kernels<Arch, T, F, false>(of[0], wide[0]);
  set_kernels<Arch, T, F, true>(of[1], wide[1]);
}

}  // namespace

template <class Arch>
LoraPersistentKernels LoraPersistentKernels::make() {
  LoraPersistentKernels kernels{};
  set_kernels<Arch, __half, __half>(kernels.of[0][0], kernels.wide[0][0]);
  set_kernels<Arch, __half, float>(kernels.of[0][1], kernels.wide[0][1]);
  set_kernels<Arch, __nv_bfloat16, __nv_bfloat16>(kernels.of[1][0], kernels.wide[1][0]);
  set_kernels<Arch, __nv_bfloat16, float>(kernels.of[1][1], kernels.wide[1][1]);
  return kernels;
}

template LoraPersistentKernels LoraPersistentKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
