// The loops of quantizing to integers, for vectors of any instruction set. V and From are types of
// an unnamed namespace (matmul/loops.hpp says why).
#pragma once

#include <cstdint>

#include "cpu/isa/unroll.hpp"
#include "cpu/quantize/kernels.hpp"

namespace nf4::cpu {

template <class V, class From>
bool int4_range(const void *in, int64_t elements, float *low, float *high) {
  const char *from = static_cast<const char *>(in);
  auto lows = V::zero(), highs = V::zero();
  typename V::Mask finite = V::all();
  for (int64_t i = 0; i < elements; i += V::kLanes, from += V::kLanes * From::kBytes) {
    const auto x = From::load(from);
    const auto is_finite = V::is_finite(x);
    finite &= is_finite;
    const auto finite_x = V::where(is_finite, x);
    lows = V::min(lows, finite_x);
    highs = V::max(highs, finite_x);
  }
  // For zeros the result is +0.
  *low = V::lowest(lows) + 0.0f;
  *high = V::highest(highs) + 0.0f;
  return V::is_all(finite);
}

// Scales and zeros as core/round_int4.hpp defines them.
template <class V>
void int4_scales(const Int4ScalesArgs &args) {
  for (int i = 0; i < kInt4Groups; i += V::kLanes) {
    const auto low = V::load(args.low + i), high = V::load(args.high + i);
    // If all elements are zeros, max() returns its second operand, +0.
    const auto span = args.symmetric ? V::multiply(V::set(2), V::max(V::negative(low), high))
                                     : V::subtract(high, low);
    const auto scale = V::round_scale(V::divide(span, V::set(15)), args.fp16, args.bits + i);
    V::store(args.scales + i, scale);
    auto zero = V::set(8);
    if (!args.symmetric) {
      const auto nearest = V::nearest(V::divide(V::negative(low), scale));
      zero = V::max(V::min(nearest, V::set(15)), V::zero());
    }
    V::store(args.zeros + i, zero);
  }
}

template <class V, class From, class Encoder>
void int4_codes_with(const Encoder &encoder, const Int4CodesArgs &args) {
  constexpr int kVectors = kKernelStep / V::kLanes;
  const char *from = static_cast<const char *>(args.in);
  uint8_t *out = args.codes;
  for (int64_t i = 0; i < args.elements; i += kKernelStep, out += kKernelStep / 2) {
    typename V::Integers codes[kVectors];
    NF4_UNROLL
    for (int j = 0; j < kVectors; ++j, from += V::kLanes * From::kBytes)
      codes[j] = encoder(From::load(from));
    V::pack(codes, out);
  }
}

// Computes the code of any x by the rule, with a division.
template <class V>
struct AnyEncoder {
  typename V::Vector scale, zero;

  typename V::Integers operator()(typename V::Vector x) const {
    const auto code = V::add(V::nearest(V::divide(x, scale)), zero);
    const auto clamped = V::max(V::min(code, V::set(15)), V::zero());
    return V::to_integers(V::replace_nan(clamped, x, zero));
  }
};

// Computes the code of finite x, with the quotient of the rule to the bit. An estimate and its
// remainder by the rounded inverse are closer to the quotient than 2^-44, and a quotient by a scale
// of 11 bits is no closer than 2^-36 to a point where rounding changes. x is first clamped to the
// range of the codes, whose ends are exact.
template <class V>
struct FiniteEncoder {
  typename V::Vector scale, inverse, low, high;
  typename V::Integers zero;

  FiniteEncoder(float scale, float zero)
      : scale(V::set(scale)),
        inverse(V::divide(V::set(1), V::set(scale))),
        low(V::set(-zero * scale)),
        high(V::set((15 - zero) * scale)),
        zero(V::to_integers(V::set(zero))) {}

  typename V::Integers operator()(typename V::Vector x) const {
    const auto within = V::max(V::min(x, high), low);
    const auto estimate = V::multiply(within, inverse);
    const auto remainder = V::multiply_subtract(estimate, scale, within);
    return V::add_integers(V::to_integers(V::multiply_add(remainder, inverse, estimate)), zero);
  }
};

template <class V, class From>
void int4_codes(const Int4CodesArgs &args) {
  // Here nothing overflows, and numbers that underflow round to 0.
  if (args.finite && args.scale > 0x1p-96f && args.scale < 0x1p96f)
    int4_codes_with<V, From>(FiniteEncoder<V>(args.scale, args.zero), args);
  else
    int4_codes_with<V, From>(AnyEncoder<V>{V::set(args.scale), V::set(args.zero)}, args);
}

}  // namespace nf4::cpu
