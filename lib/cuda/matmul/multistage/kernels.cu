// Instantiates the multistage kernels of one GPU family; compiled once for each family.
#include "cuda/arch.cuh"
#include "cuda/matmul/multistage/codebook.cuh"
#include "cuda/matmul/multistage/fill.hpp"
#include "cuda/matmul/multistage/kernel.cuh"
#include "cuda/matmul/multistage/kernels.hpp"

namespace nf4::cuda {
namespace {

template <class Arch, class T>
void set_kernels(const void *(&kernels)[kMultistageCount]) {
  fill_multistage(kernels, [](auto config) -> const void * {
    constexpr MatmulConfig kConfig = kMatmulConfigs[decltype(config)::value];
    if constexpr (has_multistage_tile(WeightKind::kCodebook, kConfig.tile_m, Arch::kTensorCores))
      return (
          const void *)matmul_multistage<CodebookWeight<Arch, T, kConfig.scale_on>, kConfig.tile_m>;
    else
      return nullptr;
  });
}

}  // namespace

template <class Arch>
MultistageKernels MultistageKernels::make() {
  MultistageKernels kernels{};
  set_kernels<Arch, __half>(kernels.of[0]);
  if constexpr (Arch::kTensorCores) set_kernels<Arch, __nv_bfloat16>(kernels.of[1]);
  return kernels;
}

template MultistageKernels MultistageKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
