// Instantiates quantize's kernels for one GPU family; compiled once for each family.
#include "cuda/quantize/e2m1.cuh"
#include "cuda/quantize/kernels.hpp"
#include "cuda/quantize/nested.cuh"
#include "cuda/quantize/weights.cuh"
#include "nf4/nf4.h"

namespace nf4::cuda {
namespace {

template <class Arch, class T>
void set_weights(const void *(&kernels)[2]) {
  kernels[false] = (const void *)quantize_weights<Arch, T, false>;
  kernels[true] = (const void *)quantize_weights<Arch, T, true>;
}

}  // namespace

template <class Arch>
QuantizeKernels QuantizeKernels::make() {
  QuantizeKernels kernels{
      {},
      (const void *)reduce_sums<Arch>,
      (const void *)quantize_scales<Arch>,
      {(const void *)quantize_e2m1<Arch, float>, (const void *)quantize_e2m1<Arch, __half>,
       (const void *)quantize_e2m1<Arch, __nv_bfloat16>}};
  set_weights<Arch, float>(kernels.weights[NF4_DTYPE_FP32 - 1]);
  set_weights<Arch, __half>(kernels.weights[NF4_DTYPE_FP16 - 1]);
  set_weights<Arch, __nv_bfloat16>(kernels.weights[NF4_DTYPE_BF16 - 1]);
  return kernels;
}

template QuantizeKernels QuantizeKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
