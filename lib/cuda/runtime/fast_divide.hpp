// Division of small numbers by a divisor that the host knows: a multiplication and a shift.
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

}  // namespace nf4::cuda
