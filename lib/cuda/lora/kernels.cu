// Instantiates the kernels of an adapter's product with x for one GPU family; compiled once for
// each family.
#include "cuda/lora/kernels.hpp"
#include "cuda/lora/product.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T, class F, bool kGradient>
void set_kernels(const void *(&of)[2][2]) {
  of[0][0] = (const void *)lora_product<Arch, T, F, kGradient, 1, 2>;
  of[0][1] = (const void *)lora_product<Arch, T, F, kGradient, 1, 8>;
  of[1][0] = (const void *)lora_product<Arch, T, F, kGradient, 2, 2>;
  of[1][1] = (const void *)lora_product<Arch, T, F, kGradient, 2, 8>;
}

template <class Arch, class T, class F>
void set_kernels(const void *(&of)[2][2][2]) {
  set_kernels<Arch, T, F, false>(of[0]);
  set_kernels<Arch, T, F, true>(of[1]);
}

}  // namespace

template <class Arch>
LoraKernels LoraKernels::make() {
  LoraKernels kernels{};
  kernels.any[0] = (const void *)lora_product_any<Arch, float>;
  kernels.any[1] = (const void *)lora_product_any<Arch, __half>;
  kernels.any[2] = (const void *)lora_product_any<Arch, __nv_bfloat16>;
  if constexpr (Arch::kTensorCores) {
    set_kernels<Arch, __half, __half>(kernels.product[0][0]);
    set_kernels<Arch, __half, float>(kernels.product[0][1]);
    set_kernels<Arch, __nv_bfloat16, __nv_bfloat16>(kernels.product[1][0]);
    set_kernels<Arch, __nv_bfloat16, float>(kernels.product[1][1]);
  }
  return kernels;
}

template LoraKernels LoraKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
