// Division by a divisor that the host knows: a multiplication and a shift.
#pragma once

#include <cstdint>

#include "core/macros.hpp"

namespace nf4::cuda {

// Exact for numbers below 1024.
struct FastDivisor {
  static constexpr int kShift = 22;
  uint32_t multiplier;

  static constexpr FastDivisor of(int64_t divisor) {
    return {static_cast<uint32_t>(((int64_t{1} << kShift) + divisor - 1) / divisor)};
  }
  NF4_HOST_DEVICE uint32_t divide(uint32_t number) const { return number * multiplier >> kShift; }
};

// Exact for numbers below 2^31: the multiplier is 2^shift / divisor rounded up, with 2^31 or more
// beyond the divisor's own bits (Granlund and Montgomery, "Division by Invariant Integers using
// Multiplication", 1994).
struct WideDivisor {
  uint32_t multiplier;
  int shift;

  // 0 < divisor < 2^31
  static constexpr WideDivisor of(int64_t divisor) {
    int log2 = 0;
    while ((int64_t{1} << log2) < divisor) ++log2;
    const uint64_t power = uint64_t{1} << (31 + log2);
    return {static_cast<uint32_t>((power + static_cast<uint64_t>(divisor) - 1) /
                                  static_cast<uint64_t>(divisor)),
            31 + log2};
  }
  NF4_HOST_DEVICE uint32_t divide(uint32_t number) const {
    return static_cast<uint32_t>(uint64_t{number} * multiplier >> shift);
  }
};

}  // namespace nf4::cuda
