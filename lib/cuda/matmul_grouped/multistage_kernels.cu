// Instantiates the grouped multistage kernels of one GPU family; compiled once for each family.
#include "cuda/arch.cuh"
#include "cuda/matmul/multistage/codebook.cuh"
#include "cuda/matmul/multistage/fill.hpp"
#include "cuda/matmul_grouped/kernels.hpp"
#include "cuda/matmul_grouped/multistage_kernel.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T>
void set_kernels(const void *(&kernels)[kMultistageCount]) {
  fill_multistage(kernels, [](auto config) -> const void * {
    constexpr MatmulConfig kConfig = kMatmulConfigs[decltype(config)::value];
    if constexpr (has_experts_kernel(WeightKind::kCodebook, decltype(config)::value) &&
                  has_multistage_tile(WeightKind::kCodebook, kConfig.tile_m, Arch::kTensorCores))
      return (const void *)
          matmul_grouped_multistage<CodebookWeight<Arch, T, kConfig.scale_on>, kConfig.tile_m>;
    else
      return nullptr;
  });
}

}  // namespace

template <class Arch>
GroupedMultistageKernels GroupedMultistageKernels::make() {
  GroupedMultistageKernels kernels{};
  set_kernels<Arch, __half>(kernels.of[0]);
  if constexpr (Arch::kTensorCores) set_kernels<Arch, __nv_bfloat16>(kernels.of[1]);
  return kernels;
}

template GroupedMultistageKernels GroupedMultistageKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
