// Instantiates the grouped multistage kernels of one GPU family; compiled once for each family.
#include <utility>

#include "cuda/arch.cuh"
#include "cuda/matmul_grouped/kernels.hpp"
#include "cuda/matmul_grouped/multistage_kernel.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T, int Config>
const void *kernel_of() {
  constexpr MatmulConfig kConfig = kMatmulConfigs[Config];
  if constexpr (has_experts_kernel(WeightKind::kCodebook, Config) &&
                has_multistage_tile(WeightKind::kCodebook, kConfig.tile_m, Arch::kTensorCores))
    return (const void *)
        matmul_grouped_multistage<CodebookWeight<Arch, T, kConfig.scale_on>, kConfig.tile_m>;
  else
    return nullptr;
}

template <class Arch, class T, int... Index>
void set_kernels(const void *(&kernels)[kMultistageCount], std::integer_sequence<int, Index...>) {
  ((kernels[Index] = kernel_of<Arch, T, kFirstMultistage + Index>()), ...);
}

}  // namespace

template <class Arch>
GroupedMultistageKernels GroupedMultistageKernels::make() {
  GroupedMultistageKernels kernels{};
  constexpr auto kConfigs = std::make_integer_sequence<int, kMultistageCount>();
  set_kernels<Arch, __half>(kernels.of[0], kConfigs);
  if constexpr (Arch::kTensorCores) set_kernels<Arch, __nv_bfloat16>(kernels.of[1], kConfigs);
  return kernels;
}

template GroupedMultistageKernels GroupedMultistageKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
