// Instantiates the gradient's mma and skinny kernels of one GPU family; compiled once for each
// family.
#include "cuda/arch.cuh"
#include "cuda/matmul/mma/codebook_source.cuh"
#include "cuda/matmul_grad/kernels.hpp"
#include "cuda/matmul_grad/products.cuh"
#include "cuda/matmul_grad/skinny_kernel.cuh"
#include "cuda/weight/scales.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T, class Scales>
void set_mma(GradKernels &kernels, int dtype) {
  kernels.mma[dtype][Scales::kKind] =
      (const void *)matmul_mma<Arch, T, CodebookSource<Arch, Scales, true>, GradProducts<Arch, T>>;
}
template <class Arch, class Scales>
void set_mma(GradKernels &kernels) {
  set_mma<Arch, float, Scales>(kernels, 0);
  set_mma<Arch, __half, Scales>(kernels, 1);
  set_mma<Arch, __nv_bfloat16, Scales>(kernels, 2);
}

template <class Arch, class T, class Scales>
void set_skinny(const void *(&of)[2]) {
  if constexpr (Arch::kTensorMaps && Arch::kClusters) {
    of[0] = (const void *)matmul_grad_skinny<Arch, T, Scales, 1>;
    of[1] = (const void *)matmul_grad_skinny<Arch, T, Scales, 2>;
  }
}

}  // namespace

template <class Arch>
GradKernels GradKernels::make() {
  GradKernels kernels{};
  set_mma<Arch, FlatScales>(kernels);
  set_mma<Arch, NestedScales>(kernels);
  set_mma<Arch, ByteScales>(kernels);
  set_skinny<Arch, __half, FlatScales>(kernels.skinny[0][0]);
  set_skinny<Arch, __half, NestedScales>(kernels.skinny[0][1]);
  set_skinny<Arch, __nv_bfloat16, FlatScales>(kernels.skinny[1][0]);
  set_skinny<Arch, __nv_bfloat16, NestedScales>(kernels.skinny[1][1]);
  return kernels;
}

template GradKernels GradKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
