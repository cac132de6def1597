// Converts float to and from fp16 and bf16 by bits, with round-to-nearest-even; a NaN stays a NaN.
// This is for the host; on a GPU the hardware converts in the same way.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/macros.hpp"

namespace nf4 {

// Storage of a 16-bit float. It has a type of its own, so that dtypes are distinct types.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

NF4_HOST_DEVICE uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

NF4_HOST_DEVICE float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float bf16_to_float(uint16_t h) { return bits_float(static_cast<uint32_t>(h) << 16); }

inline uint16_t float_to_half(float x) {
  const uint32_t bits = float_bits(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  // 65520, halfway between the largest half and the next power of two, rounds to infinity.
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the result is subnormal: adding 0.5 leaves it, rounded, in the low bits.
    const float shifted = bits_float(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(float_bits(shifted) - float_bits(0.5f));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // The bits, taken as a float, are the value times 2^-112, subnormal halves included.
  return bits_float(sign | float_bits(bits_float(magnitude << 13) * 0x1p112f));
}

inline float to_float(float x) { return x; }
inline float to_float(Half x) { return half_to_float(x.bits); }
inline float to_float(BFloat16 x) { return bf16_to_float(x.bits); }

template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline Half from_float<Half>(float x) {
  return {float_to_half(x)};
}
template <>
inline BFloat16 from_float<BFloat16>(float x) {
  return {float_to_bf16(x)};
}

}  // namespace nf4
