// Instantiates the gradient's mma kernels of one GPU family; compiled once for each.
#include "cuda/arch.cuh"
#include "cuda/matmul/mma/codebook_source.cuh"
#include "cuda/matmul_grad/kernels.hpp"
#include "cuda/matmul_grad/products.cuh"
#include "cuda/weight/scales.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T, class Scales>
const void *mma_of() {
  return (
      const void *)matmul_mma<Arch, T, CodebookSource<Arch, Scales, true>, GradProducts<Arch, T>>;
}

}  // namespace

template <class Arch>
GradKernels GradKernels::make() {
  return {
      {{mma_of<Arch, float, FlatScales>(), mma_of<Arch, float, NestedScales>()},
       {mma_of<Arch, __half, FlatScales>(), mma_of<Arch, __half, NestedScales>()},
       {mma_of<Arch, __nv_bfloat16, FlatScales>(), mma_of<Arch, __nv_bfloat16, NestedScales>()}}};
}

template GradKernels GradKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
