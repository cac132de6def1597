// Instantiates the kernels of integer weights of one GPU family; compiled once for each.
#include "cuda/arch.cuh"
#include "cuda/matmul/kernels.hpp"
#include "cuda/matmul/mma/few_rows.cuh"
#include "cuda/matmul/mma/int4_source.cuh"
#include "cuda/matmul/mma/kernel.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T, nf4_int4_layout Layout, bool kByColumn>
void set_kernels(Int4MatmulKernels &kernels, int dtype) {
  using Source = Int4Source<Arch, Layout, kByColumn>;
  constexpr int kLayout = Layout - NF4_INT4_GPTQ;
  kernels.of[dtype][kLayout][kByColumn][kMma64x64] = (const void *)matmul_mma<Arch, T, Source>;
  if constexpr (Arch::kTensorCores)
    kernels.mma_few[dtype][kLayout][kByColumn] = (const void *)matmul_mma_few<Arch, T, Source>;
}

template <class Arch, class T>
void set_kernels(Int4MatmulKernels &kernels, int dtype) {
  set_kernels<Arch, T, NF4_INT4_GPTQ, false>(kernels, dtype);
  set_kernels<Arch, T, NF4_INT4_GPTQ, true>(kernels, dtype);
  set_kernels<Arch, T, NF4_INT4_AWQ, false>(kernels, dtype);
  set_kernels<Arch, T, NF4_INT4_AWQ, true>(kernels, dtype);
  set_kernels<Arch, T, NF4_INT4_COMPRESSED_TENSORS, false>(kernels, dtype);
  set_kernels<Arch, T, NF4_INT4_COMPRESSED_TENSORS, true>(kernels, dtype);
}

}  // namespace

template <class Arch>
Int4MatmulKernels Int4MatmulKernels::make() {
  Int4MatmulKernels kernels{};
  set_kernels<Arch, __half>(kernels, 0);
  set_kernels<Arch, __nv_bfloat16>(kernels, 1);
  return kernels;
}

template Int4MatmulKernels Int4MatmulKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
