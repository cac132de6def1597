// Differences between outputs, by the promise of nf4.h: bits are equal, and any NaN equals any NaN.
#pragma once

#include <cstdint>

#include "nf4/nf4.h"

namespace nf4::test {

constexpr int64_t kNoDifference = -1;

// The first of `elements` numbers that differ, or kNoDifference. NaNs are equal.
int64_t first_difference(nf4_dtype dtype, const void *a, const void *b, int64_t elements);

// The first byte that differs, or kNoDifference.
int64_t first_difference(const void *a, const void *b, int64_t bytes);

}  // namespace nf4::test
