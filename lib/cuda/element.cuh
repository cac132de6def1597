// The element types of dense data on the device: conversions by the hardware, and 16-byte vectors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace nf4::cuda {

template <class T>
constexpr int kPerVector = 16 / sizeof(T);

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Packs two neighbours into 32 bits, the first in the low half, rounded to nearest even. On sm_75
// the bf16 conversion is CUDA's own emulation.
__device__ __forceinline__ uint32_t pack_pair(__half, float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  return *reinterpret_cast<const uint32_t *>(&pair);
}
__device__ __forceinline__ uint32_t pack_pair(__nv_bfloat16, float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t *>(&pair);
}

template <class T>
__device__ __forceinline__ uint4 pack_vector(const float (&v)[8]) {
  return {pack_pair(T{}, v[0], v[1]), pack_pair(T{}, v[2], v[3]), pack_pair(T{}, v[4], v[5]),
          pack_pair(T{}, v[6], v[7])};
}
template <class T>
__device__ __forceinline__ uint4 pack_vector(const float (&v)[4]) {
  static_assert(sizeof(T) == 4);
  return {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
          __float_as_uint(v[3])};
}

}  // namespace nf4::cuda
