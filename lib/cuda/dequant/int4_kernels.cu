// Instantiates dequantize's kernels of integer weights for one GPU family; compiled once for each
// family.
#include "cuda/dequant/int4_aligned.cuh"
#include "cuda/dequant/int4_any.cuh"
#include "cuda/dequant/int4_kernels.hpp"
#include "nf4/nf4.h"

namespace nf4::cuda {
namespace {

template <class Arch, class T>
void set_kernels(Int4DequantKernels &kernels, nf4_dtype dtype) {
  const void *(&aligned)[3] = kernels.aligned[dtype - 1];
  aligned[NF4_INT4_GPTQ - 1] = (const void *)dequant_int4_aligned<Arch, T, GptqTile<Arch>>;
  aligned[NF4_INT4_AWQ - 1] = (const void *)dequant_int4_aligned<Arch, T, AwqTile<Arch>>;
  aligned[NF4_INT4_COMPRESSED_TENSORS - 1] =
      (const void *)dequant_int4_aligned<Arch, T, RowPackedTile<Arch>>;
  kernels.any[dtype - 1] = (const void *)dequant_int4_any<Arch, T>;
}

}  // namespace

template <class Arch>
Int4DequantKernels Int4DequantKernels::make() {
  Int4DequantKernels kernels{};
  set_kernels<Arch, float>(kernels, NF4_DTYPE_FP32);
  set_kernels<Arch, __half>(kernels, NF4_DTYPE_FP16);
  set_kernels<Arch, __nv_bfloat16>(kernels, NF4_DTYPE_BF16);
  return kernels;
}

template Int4DequantKernels Int4DequantKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
