// The loops of quantizing to integers, for vectors of any instruction set. V and From are types of
// an unnamed namespace (matmul/loops.hpp says why).
#pragma once

#include <cstdint>

#include "cpu/isa/unroll.hpp"
#include "cpu/quantize/kernels.hpp"

namespace nf4::cpu {

template <class V, class From>
void int4_range(const void *in, int64_t elements, float *low, float *high) {
  const char *from = static_cast<const char *>(in);
  auto lows = V::zero(), highs = V::zero();
  for (int64_t i = 0; i < elements; i += V::kLanes, from += V::kLanes * From::kBytes) {
    const auto x = V::finite_or_zero(From::load(from));
    lows = V::min(lows, x);
    highs = V::max(highs, x);
  }
  // Of zeros, +0.
  *low = V::lowest(lows) + 0.0f;
  *high = V::highest(highs) + 0.0f;
}

template <class V, class From>
void int4_codes(const Int4CodesArgs &args) {
  constexpr int kVectors = kKernelStep / V::kLanes;
  const char *from = static_cast<const char *>(args.in);
  uint8_t *out = args.codes;
  for (int64_t i = 0; i < args.elements; i += kKernelStep, out += kKernelStep / 2) {
    typename V::Integers codes[kVectors];
    NF4_UNROLL
    for (int j = 0; j < kVectors; ++j, from += V::kLanes * From::kBytes)
      codes[j] = V::encode(From::load(from), args.scale, args.zero);
    V::pack(codes, out);
  }
}

}  // namespace nf4::cpu
