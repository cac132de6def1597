// Instantiates the kernels for the gradients of an adapter's matrices, for one GPU family; compiled
// once for each family.
#include "cuda/lora/grad.cuh"
#include "cuda/lora/grad_kernels.hpp"

namespace nf4::cuda {
namespace {

template <class Arch, class T, bool kVectors>
void set_kernels(const void *(&of)[2]) {
  of[0] = (const void *)lora_grad<Arch, T, kVectors, kLoraGradRanks[0]>;
  of[1] = (const void *)lora_grad<Arch, T, kVectors, kLoraGradRanks[1]>;
}

template <class Arch, class T>
void set_kernels(const void *(&of)[2][2]) {
  set_kernels<Arch, T, false>(of[0]);
  set_kernels<Arch, T, true>(of[1]);
}

}  // namespace

template <class Arch>
LoraGradKernels LoraGradKernels::make() {
  LoraGradKernels kernels{};
  kernels.any[0] = (const void *)lora_grad_any<Arch, float>;
  kernels.any[1] = (const void *)lora_grad_any<Arch, __half>;
  kernels.any[2] = (const void *)lora_grad_any<Arch, __nv_bfloat16>;
  if constexpr (Arch::kTensorCores) {
    set_kernels<Arch, __half>(kernels.of[0]);
    set_kernels<Arch, __nv_bfloat16>(kernels.of[1]);
  }
  return kernels;
}

template LoraGradKernels LoraGradKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
