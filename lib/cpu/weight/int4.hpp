// What an integer weight's codes, zeros and scales mean to the CPU kernels.
#pragma once

#include <cstdint>

#include "core/float16.hpp"
#include "core/int4.hpp"
#include "cpu/weight/scales.hpp"
#include "problem.hpp"

namespace nf4::cpu {

inline float int4_scale_at(const Int4Weight &weight, int64_t index) {
  const uint16_t bits = static_cast<const uint16_t *>(weight.scales)[index];
  return weight.scales_dtype == NF4_DTYPE_FP16 ? half_to_float(bits) : bf16_to_float(bits);
}

// Of stored column k.
inline int64_t int4_group(const Int4Weight &weight, int64_t k) {
  return weight.g_idx != nullptr ? weight.g_idx[k] : k / weight.group_size;
}

// Of row n, stored column k.
inline float int4_value_at(const Int4Weight &weight, int64_t n, int64_t k) {
  const int64_t g = int4_group(weight, k);
  const uint32_t code =
      unpack_int4(weight.packed, int4_code(weight.layout, weight.rows, weight.cols, n, k));
  uint32_t zero = kInt4SymmetricZero;
  if (weight.zeros != nullptr)
    zero = int4_zero_point(
        unpack_int4(weight.zeros, int4_zero(weight.layout, weight.rows, weight.groups, n, g)),
        weight.zero_offset);
  return int4_value(
      code, zero,
      int4_scale_at(weight, int4_scale(weight.layout, weight.rows, weight.groups, n, g)));
}

// The column of the weight that a stored column is.
inline int64_t int4_column(const Int4Weight &weight, int64_t k) {
  return weight.permutation != nullptr ? weight.permutation[k] : k;
}

// The zeros of `count` groups of row n from g on, as numbers.
inline void read_int4_zeros(const Int4Weight &weight, int64_t n, int64_t g, int64_t count,
                            float *zeros) {
  if (weight.zeros == nullptr) {
    std::fill_n(zeros, count, static_cast<float>(kInt4SymmetricZero));
    return;
  }
  Int4Place place = int4_zero(weight.layout, weight.rows, weight.groups, n, g);
  const int64_t step = weight.layout == NF4_INT4_COMPRESSED_TENSORS ? 1 : int4_words(weight.rows);
  for (int64_t i = 0; i < count; ++i, place.word += step)
    zeros[i] = static_cast<float>(
        static_cast<int>(int4_zero_point(unpack_int4(weight.zeros, place), weight.zero_offset)));
}

// Their scales. A NaN becomes the canonical one.
inline void read_int4_scales(const Int4Weight &weight, int64_t n, int64_t g, int64_t count,
                             float *scales) {
  const int64_t first = int4_scale(weight.layout, weight.rows, weight.groups, n, g);
  const int64_t step = weight.layout == NF4_INT4_COMPRESSED_TENSORS ? 1 : weight.rows;
  for (int64_t i = 0; i < count; ++i)
    scales[i] = canonical(int4_scale_at(weight, first + i * step));
}

}  // namespace nf4::cpu
