// The scale of a group of integers in its stored form.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace nf4::cuda {
namespace {

// Converts the low 16 bits, of fp16 or bf16.
__device__ __forceinline__ float scale_to_float(bool fp16, uint32_t bits) {
  return fp16 ? __half2float(__ushort_as_half(static_cast<unsigned short>(bits)))
              : __uint_as_float(bits << 16);
}

}  // namespace
}  // namespace nf4::cuda
