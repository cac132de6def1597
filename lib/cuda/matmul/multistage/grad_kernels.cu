// Instantiates the gradient's multistage kernels of one GPU family; compiled once for each family.
#include <utility>

#include "cuda/arch.cuh"
#include "cuda/matmul/multistage/kernel.cuh"
#include "cuda/matmul/multistage/kernels.hpp"
#include "cuda/matmul/multistage/transposed.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T, int... Index>
void set_kernels(const void *(&kernels)[kMultistageCount], std::integer_sequence<int, Index...>) {
  ((kernels[Index] =
        (const void *)matmul_multistage<TransposedCodebook<Arch, T>,
                                        kMatmulConfigs[kFirstMultistage + Index].tile_m>),
   ...);
}

}  // namespace

template <class Arch>
GradMultistageKernels GradMultistageKernels::make() {
  GradMultistageKernels kernels{};
  if constexpr (Arch::kTensorCores) {
    constexpr auto kConfigs = std::make_integer_sequence<int, kMultistageCount>();
    set_kernels<Arch, __half>(kernels.of[0], kConfigs);
    set_kernels<Arch, __nv_bfloat16>(kernels.of[1], kConfigs);
  }
  return kernels;
}

template GradMultistageKernels GradMultistageKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
