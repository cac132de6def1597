// Instantiates the gradient's multistage kernels of one GPU family; compiled once for each family.
#include "cuda/arch.cuh"
#include "cuda/matmul/multistage/fill.hpp"
#include "cuda/matmul/multistage/kernel.cuh"
#include "cuda/matmul/multistage/kernels.hpp"
#include "cuda/matmul/multistage/transposed.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T>
void set_kernels(const void *(&kernels)[kMultistageCount]) {
  fill_multistage(kernels, [](auto config) {
    constexpr int kTileM = kMatmulConfigs[decltype(config)::value].tile_m;
    return (const void *)matmul_multistage<TransposedCodebook<Arch, T>, kTileM>;
  });
}

}  // namespace

template <class Arch>
GradMultistageKernels GradMultistageKernels::make() {
  GradMultistageKernels kernels{};
  if constexpr (Arch::kTensorCores) {
    set_kernels<Arch, __half>(kernels.of[0]);
    set_kernels<Arch, __nv_bfloat16>(kernels.of[1]);
  }
  return kernels;
}

template GradMultistageKernels GradMultistageKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
