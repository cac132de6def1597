// How numbers become MXFP4 and NVFP4, by the rules of nf4.h: the scale of a block, and the codes.
#pragma once

#include <cstdint>

#include "core/encode.hpp"
#include "core/scale_bytes.hpp"
#include "nf4/nf4.h"

namespace nf4 {

// The E8M0 scale of a block. The mantissa is rounded up to the next power of two from 1.75 on, or
// above 1.5, or never.
NF4_HOST_DEVICE uint32_t e8m0_scale(float absmax, int32_t rule) {
  const uint32_t carry = rule == NF4_SCALE_EVEN   ? 1u << 21
                         : rule == NF4_SCALE_CEIL ? (1u << 22) - 1
                                                  : 0u;
  const uint32_t exponent = (float_bits(absmax) + carry) >> 23;
  return exponent < 2 ? 0u : exponent - 2;
}

// Rounds to E4M3, halves to even; numbers above 448, and NaN, give 448, and negative ones 0.
NF4_HOST_DEVICE uint32_t to_e4m3(float x) {
  constexpr float kLargest = 448.0f;
  if (!(x < kLargest)) return 0x7e;
  if (x <= 0) return 0;
  // The sum of x and a power of two 20 binary places above x's last bit rounds x. Below 2^-6
  // numbers are multiples of 2^-9.
  const uint32_t bits = float_bits(x);
  const uint32_t exponent = bits < (121u << 23) ? 121u : bits >> 23;
  const float power = bits_float((exponent + 20) << 23);
  const float rounded = add_rn(add_rn(x, power), -power);
  return float_bits(multiply_rn(rounded, 0x1p-120f)) >> 20;
}

// The E4M3 scale of a block. A scale of 0 becomes what compressed-tensors and ModelOpt store for a
// block of zeros.
NF4_HOST_DEVICE uint32_t e4m3_scale(float absmax, float global, bool divides) {
  const uint32_t byte = to_e4m3(divides ? multiply_rn(divide_rn(absmax, 6.0f), global)
                                        : divide_rn(absmax, multiply_rn(6.0f, global)));
  if (byte != 0) return byte;
  return divides ? 0x20 : 0x38;
}

// The code nearest to x, halves to the even code. A NaN gives 0, and so does -0.
NF4_HOST_DEVICE uint32_t e2m1_code(float x) {
  const float magnitude = x < 0 ? -x : x;
  // Below 1, codes are multiples of 0.5, to which the sum with 2^22 is rounded. From 1 on they are
  // the exponent and one bit of mantissa.
  const uint32_t small = float_bits(add_rn(magnitude, 0x1p22f)) & 3;
  const uint32_t bits = float_bits(magnitude);
  const uint32_t large = ((bits + 0x1fffff + (bits >> 22 & 1)) >> 22) - (126u << 1);
  const uint32_t code = magnitude < 1 ? small : magnitude < 6 ? large : magnitude >= 6 ? 7u : 0u;
  return code | uint32_t{x < 0} << 3;
}

}  // namespace nf4
