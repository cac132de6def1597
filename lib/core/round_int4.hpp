// Rounds to nearest into integer weights: computes the scale and zero point of a group, and the
// code of an element, as nf4.h defines them. Host and device compute the same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/encode.hpp"
#include "core/int4.hpp"

namespace nf4 {

// The range of the finite elements of a group.
struct Int4Range {
  float low = 0;
  float high = 0;
  NF4_HOST_DEVICE void add(float x) {
    if (!is_finite(x)) return;
    if (x < low) low = x;
    if (x > high) high = x;
  }
};

constexpr float kInt4Max = 15;

// The scale of a group before it is rounded to 16 bits.
NF4_HOST_DEVICE float int4_exact_scale(const Int4Range &range, bool symmetric) {
  if (!symmetric) return divide_rn(add_rn(range.high, -range.low), kInt4Max);
  // If all elements are zero this is +0 and not -0; int4_scale_bits recognises only +0.
  const float absmax = -range.low > range.high ? -range.low : range.high;
  return divide_rn(multiply_rn(2.0f, absmax), kInt4Max);
}

// Returns the bits of a scale rounded to `dtype`, clamped to the positive finite numbers of it.
NF4_HOST_DEVICE uint16_t int4_scale_bits(uint16_t rounded, nf4_dtype dtype) {
  const uint16_t largest = dtype == NF4_DTYPE_FP16 ? 0x7bff : 0x7f7f;
  if (rounded == 0) return 1;
  return rounded > largest ? largest : rounded;
}

// Rounds to the nearest integer, halves to even, within 0 and 15.
NF4_HOST_DEVICE uint32_t int4_clamp(float x) {
  const float nearest = rintf(x);
  return nearest >= kInt4Max ? 15u : nearest > 0 ? static_cast<uint32_t>(nearest) : 0u;
}

NF4_HOST_DEVICE uint32_t int4_zero_of(const Int4Range &range, bool symmetric, float scale) {
  return symmetric ? kInt4SymmetricZero : int4_clamp(divide_rn(-range.low, scale));
}

NF4_HOST_DEVICE uint32_t int4_encode(float x, float scale, uint32_t zero) {
  if (x != x) return zero;
  return int4_clamp(add_rn(rintf(divide_rn(x, scale)), static_cast<float>(zero)));
}

}  // namespace nf4
