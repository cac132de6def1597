// The quantize kernels of a family.
#pragma once

#include "cuda/quantize/scales.cuh"
#include "cuda/quantize/weights.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T>
void set_weights(const void *(&kernels)[2]) {
  kernels[false] = (const void *)quantize_weights<Arch, T, false>;
  kernels[true] = (const void *)quantize_weights<Arch, T, true>;
}

template <class Arch>
QuantizeFamily quantize_family(Family family) {
  QuantizeFamily result{
      family, {}, (const void *)reduce_sums<Arch>, (const void *)quantize_scales<Arch>};
  set_weights<Arch, float>(result.weights[NF4_DTYPE_FP32 - 1]);
  set_weights<Arch, __half>(result.weights[NF4_DTYPE_FP16 - 1]);
  set_weights<Arch, __nv_bfloat16>(result.weights[NF4_DTYPE_BF16 - 1]);
  return result;
}

}  // namespace
}  // namespace nf4::cuda
