// The allowed distance of a CPU variant's product from binary64.
#pragma once

#include <cmath>
#include <string>

#include "cpu/backend.hpp"
#include "cpu/isa/step.hpp"
#include "support/matmul_cases.hpp"
#include "support/matmul_expected.hpp"

namespace nf4::test {

constexpr double kFp32Unit = 0x1p-24;
constexpr double kBf16Unit = 0x1p-8;

// Tells whether the variant multiplies in bf16, and whether it rounds codebooks to bf16.
inline bool in_bf16(const cpu::Variant &variant, nf4_dtype dtype) {
  const std::string name = variant.name;
  return (name == "avx512bf16" || name == "neonbf16") && dtype == NF4_DTYPE_BF16;
}
inline bool rounds_to_bf16(const cpu::Variant &variant, nf4_dtype dtype) {
  return variant.bf16_codebook != nullptr && dtype == NF4_DTYPE_BF16;
}

// The most roundings that any product undergoes: the sums of the narrowest vectors and of the lanes
// of one, and a few for the factors, the scale and the bias.
inline double roundings(int64_t cols) { return static_cast<double>(cols) / 8 + 32; }

// has_codebook: whether the weight's numbers are looked up in its codebook, not those of integers.
inline bool is_right(const cpu::Variant &variant, nf4_dtype dtype, int64_t cols, bool has_codebook,
                     const Expected &expected, double y) {
  constexpr double kSafe = 0x1p126;
  if (!std::isfinite(expected.value)) return !std::isfinite(y);
  if (expected.parts > kSafe || expected.largest > kSafe) return true;
  // The others multiply integers, and what dequantize makes of other columns, in fp32.
  const bool rounds = in_bf16(variant, dtype) || (rounds_to_bf16(variant, dtype) && has_codebook &&
                                                  cols % cpu::kKernelStep == 0);
  const double relative = roundings(cols) * kFp32Unit + (rounds ? kBf16Unit : 0);
  // vdpbf16ps, like bfdot, treats subnormal numbers as zero.
  const double underflow = in_bf16(variant, dtype) ? 0x1p-126 : 0x1p-149;
  const double error = relative * expected.parts + underflow * expected.small;
  return y >= round_to(dtype, expected.value - error) &&
         y <= round_to(dtype, expected.value + error);
}

}  // namespace nf4::test
