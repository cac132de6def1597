// Instantiates the kernels of integer weights of one GPU family; compiled once for each.
#include "cuda/arch.cuh"
#include "cuda/matmul/kernels.hpp"
#include "cuda/matmul/mma/int4_source.cuh"
#include "cuda/matmul/mma/kernel.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T, nf4_int4_layout Layout>
void set_kernels(const void *(&kernels)[2][kFamilyConfigCount]) {
  kernels[0][kMma64x64] = (const void *)matmul_mma<Arch, T, Int4Source<Arch, Layout, false>>;
  kernels[1][kMma64x64] = (const void *)matmul_mma<Arch, T, Int4Source<Arch, Layout, true>>;
}

template <class Arch, class T>
void set_kernels(const void *(&kernels)[3][2][kFamilyConfigCount]) {
  set_kernels<Arch, T, NF4_INT4_GPTQ>(kernels[0]);
  set_kernels<Arch, T, NF4_INT4_AWQ>(kernels[1]);
  set_kernels<Arch, T, NF4_INT4_COMPRESSED_TENSORS>(kernels[2]);
}

}  // namespace

template <class Arch>
Int4MatmulKernels Int4MatmulKernels::make() {
  Int4MatmulKernels kernels{};
  set_kernels<Arch, __half>(kernels.of[0]);
  set_kernels<Arch, __nv_bfloat16>(kernels.of[1]);
  return kernels;
}

template Int4MatmulKernels Int4MatmulKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
