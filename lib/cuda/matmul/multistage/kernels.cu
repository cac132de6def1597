// Instantiates the multistage kernels of one GPU family; compiled once for each family.
#include "cuda/arch.cuh"
#include "cuda/matmul/multistage/codebook.cuh"
#include "cuda/matmul/multistage/e2m1.cuh"
#include "cuda/matmul/multistage/fill.hpp"
#include "cuda/matmul/multistage/kernel.cuh"
#include "cuda/matmul/multistage/kernels.hpp"

namespace nf4::cuda {
namespace {

template <class Weight, int Config>
const void *kernel_of() {
  constexpr int kTileM = kMatmulConfigs[Config].tile_m;
  if constexpr (has_multistage_tile(Weight::kKind, kTileM, Weight::Arch::kTensorCores))
    return (const void *)matmul_multistage<Weight, kTileM>;
  else
    return nullptr;
}

template <class Arch, class T>
void set_kernels(MultistageKernels &kernels, int dtype) {
  fill_multistage(kernels.of[0][dtype], [](auto config) {
    constexpr int kConfig = decltype(config)::value;
    return kernel_of<CodebookWeight<Arch, T, kMatmulConfigs[kConfig].scale_on>, kConfig>();
  });
  fill_multistage(kernels.of[1][dtype], [](auto config) {
    return kernel_of<E2m1Weight<Arch, T>, decltype(config)::value>();
  });
}

}  // namespace

template <class Arch>
MultistageKernels MultistageKernels::make() {
  MultistageKernels kernels{};
  set_kernels<Arch, __half>(kernels, 0);
  if constexpr (Arch::kTensorCores) set_kernels<Arch, __nv_bfloat16>(kernels, 1);
  return kernels;
}

template MultistageKernels MultistageKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
