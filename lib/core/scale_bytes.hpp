// The scales of MXFP4 and NVFP4, which have 8 bits, and the global scale of NVFP4.
#pragma once

#include <cstdint>

#include "core/decode.hpp"
#include "core/float16.hpp"
#include "core/macros.hpp"

namespace nf4 {

// The meaning of the bytes of a format's absmax; kNone if its scales are fp32 or nested.
enum class ScaleBytes : uint8_t { kNone, kE8M0, kE4M3 };

// 2^(byte - 127), which is subnormal for 0. 255 is NaN.
NF4_HOST_DEVICE constexpr uint32_t e8m0_bits(uint32_t byte) {
  return byte << 23 | (byte == 0 || byte == 255 ? 1u << 22 : 0u);
}

// A sign, 4 bits of exponent with bias 7, and 3 of mantissa; all ones is NaN. The bits of the
// magnitude are those of a binary32 number that is 2^120 times smaller.
NF4_HOST_DEVICE float e4m3_value(uint32_t byte) {
  const uint32_t magnitude = byte & 0x7f;
  const float value = multiply_rn(bits_float(magnitude << 20), 0x1p120f);
  const uint32_t bits = magnitude == 0x7f ? 0x7fc00000u : float_bits(value);
  return bits_float(bits | (byte & 0x80) << 24);
}

NF4_HOST_DEVICE float global_scaled(float scale, float global, bool divides) {
  return divides ? divide_rn(scale, global) : multiply_rn(scale, global);
}

}  // namespace nf4
