// The meaning of an integer weight's codes, zeros and scales to the CPU kernels.
#pragma once

#include <cstdint>

#include "core/float16.hpp"
#include "core/int4.hpp"
#include "problem.hpp"

namespace nf4::cpu {

inline float int4_scale_at(const Int4Weight &weight, int64_t index) {
  const uint16_t bits = static_cast<const uint16_t *>(weight.scales)[index];
  return weight.scales_dtype == NF4_DTYPE_FP16 ? half_to_float(bits) : bf16_to_float(bits);
}

// Returns the group of stored column k.
inline int64_t int4_group(const Int4Weight &weight, int64_t k) {
  return weight.g_idx != nullptr ? weight.g_idx[k] : k / weight.group_size;
}

// Returns the value of row n, stored column k.
inline float int4_value_at(const Int4Weight &weight, int64_t n, int64_t k) {
  const int64_t g = int4_group(weight, k);
  const uint32_t code =
      unpack_int4(weight.packed, int4_code(weight.layout, weight.rows, weight.cols, n, k));
  uint32_t zero = kInt4SymmetricZero;
  if (weight.zeros != nullptr)
    zero =
        unpack_int4_zero(weight.zeros, int4_zero(weight.layout, weight.rows, weight.groups, n, g),
                         weight.zero_offset);
  return int4_value(
      code, zero,
      int4_scale_at(weight, int4_scale(weight.layout, weight.rows, weight.groups, n, g)));
}

// Returns the column of the weight that a stored column holds.
inline int64_t int4_column(const Int4Weight &weight, int64_t k) {
  return weight.permutation != nullptr ? weight.permutation[k] : k;
}

// The codes minus 8; 8 minus the zero point is added to them.
constexpr float kInt4Codebook[] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

}  // namespace nf4::cpu
