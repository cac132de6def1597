// The meaning of a stored byte: the nibble order, and the scale of double quantization. The CPU
// reference and every kernel use this one definition.
#pragma once

#include <cfloat>
#include <cstdint>

#include "core/macros.hpp"

namespace nf4 {

// The bits that nf4.h promises need binary32 arithmetic as written.
#if defined(__FAST_MATH__)
#error "libnf4 cannot be compiled with -ffast-math"
#endif
static_assert(FLT_EVAL_METHOD == 0, "binary32 arithmetic in binary32 (x87 is not supported)");

// Binary32 multiply and add, each rounded. They are never contracted to an FMA, which would change
// about a quarter of the nested scales by an ulp. Host code is compiled with -ffp-contract=off.
NF4_HOST_DEVICE constexpr float multiply_rn(float a, float b) {
  NF4_DEVICE_ONLY(return __fmul_rn(a, b));
  return a * b;
}

NF4_HOST_DEVICE constexpr float add_rn(float a, float b) {
  NF4_DEVICE_ONLY(return __fadd_rn(a, b));
  return a + b;
}

NF4_HOST_DEVICE constexpr float divide_rn(float a, float b) {
  NF4_DEVICE_ONLY(return __fdiv_rn(a, b));
  return a / b;
}

// Returns the 4-bit code of element i: even elements are in the high nibble, or in the low one.
NF4_HOST_DEVICE uint32_t unpack_code(const uint8_t *packed, int64_t i, bool low_first = false) {
  const uint32_t byte = packed[i / 2];
  return (i % 2 == 0) != low_first ? byte >> 4 : byte & 15u;
}

// Returns the byte that holds the codes of an even element and of the odd one after it.
NF4_HOST_DEVICE uint8_t pack_codes(uint32_t even, uint32_t odd) {
  return static_cast<uint8_t>(even << 4 | odd);
}

NF4_HOST_DEVICE float nested_scale(float code_value, float nested_absmax, float offset) {
  return add_rn(multiply_rn(code_value, nested_absmax), offset);
}

}  // namespace nf4
