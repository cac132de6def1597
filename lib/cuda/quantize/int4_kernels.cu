// Instantiates the kernel that quantizes to integer weights for one GPU family; compiled once for
// each family.
#include "cuda/quantize/int4_kernels.hpp"
#include "cuda/quantize/int4_weights.cuh"
#include "nf4/nf4.h"

namespace nf4::cuda {

template <class Arch>
Int4QuantizeKernels Int4QuantizeKernels::make() {
  Int4QuantizeKernels kernels{};
  kernels.of[NF4_DTYPE_FP32 - 1] = (const void *)quantize_int4<Arch, float>;
  kernels.of[NF4_DTYPE_FP16 - 1] = (const void *)quantize_int4<Arch, __half>;
  kernels.of[NF4_DTYPE_BF16 - 1] = (const void *)quantize_int4<Arch, __nv_bfloat16>;
  return kernels;
}

template Int4QuantizeKernels Int4QuantizeKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
