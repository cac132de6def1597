// Instantiates the multistage kernels of integer weights for one GPU family; compiled once for each
// family.
#include "cuda/arch.cuh"
#include "cuda/matmul/multistage/fill.hpp"
#include "cuda/matmul/multistage/int4.cuh"
#include "cuda/matmul/multistage/kernel.cuh"
#include "cuda/matmul/multistage/kernels.hpp"

namespace nf4::cuda {
namespace {

template <class Arch, class T, class Layout>
void set_layout(const void *(&kernels)[kMultistageCount]) {
  fill_multistage(kernels, [](auto config) -> const void * {
    constexpr MatmulConfig kConfig = kMatmulConfigs[decltype(config)::value];
    if constexpr (has_multistage_tile(WeightKind::kInt4, kConfig.tile_m, Arch::kTensorCores))
      return (const void *)
          matmul_multistage<MultistageInt4<Arch, T, Layout, kConfig.scale_on>, kConfig.tile_m>;
    else
      return nullptr;
  });
}

template <class Arch, class T>
void set_kernels(const void *(&kernels)[3][kMultistageCount]) {
  set_layout<Arch, T, MultistageGptq>(kernels[0]);
  // The kernels of AWQ load through stages that cp.async fills.
  if constexpr (Arch::kTensorCores)
    set_layout<Arch, T, MultistageAwq>(kernels[NF4_INT4_AWQ - NF4_INT4_GPTQ]);
  set_layout<Arch, T, MultistageRowPacked>(kernels[NF4_INT4_COMPRESSED_TENSORS - NF4_INT4_GPTQ]);
}

}  // namespace

template <class Arch>
Int4MultistageKernels Int4MultistageKernels::make() {
  Int4MultistageKernels kernels{};
  set_kernels<Arch, __half>(kernels.of[0]);
  if constexpr (Arch::kTensorCores) set_kernels<Arch, __nv_bfloat16>(kernels.of[1]);
  return kernels;
}

template Int4MultistageKernels Int4MultistageKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
