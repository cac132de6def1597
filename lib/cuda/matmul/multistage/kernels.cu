// Instantiates the multistage kernels of one GPU family; compiled once for each family.
#include <utility>

#include "cuda/arch.cuh"
#include "cuda/matmul/multistage/kernel.cuh"
#include "cuda/matmul/multistage/kernels.hpp"

namespace nf4::cuda {
namespace {

template <class Arch, class T, int Config>
const void *kernel_of() {
  constexpr MatmulConfig kConfig = kMatmulConfigs[Config];
  if constexpr (has_multistage_tile(WeightKind::kCodebook, kConfig.tile_m, Arch::kTensorCores))
    return (
        const void *)matmul_multistage<CodebookWeight<Arch, T, kConfig.scale_on>, kConfig.tile_m>;
  else
    return nullptr;
}

template <class Arch, class T, int... Index>
void set_kernels(const void *(&kernels)[kMultistageCount], std::integer_sequence<int, Index...>) {
  ((kernels[Index] = kernel_of<Arch, T, kFirstMultistage + Index>()), ...);
}

}  // namespace

template <class Arch>
MultistageKernels MultistageKernels::make() {
  MultistageKernels kernels{};
  constexpr auto kConfigs = std::make_integer_sequence<int, kMultistageCount>();
  set_kernels<Arch, __half>(kernels.of[0], kConfigs);
  if constexpr (Arch::kTensorCores) set_kernels<Arch, __nv_bfloat16>(kernels.of[1], kConfigs);
  return kernels;
}

template MultistageKernels MultistageKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
