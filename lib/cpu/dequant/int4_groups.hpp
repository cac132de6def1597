// Describes the groups of an integer weight in the form that the kernels read.
#pragma once

#include <cstdint>

#include "core/int4.hpp"
#include "cpu/dequant/kernels.hpp"
#include "problem.hpp"

namespace nf4::cpu {

// Describes `count` scales and zeros: for compressed-tensors those of row n from group g on, for
// GPTQ and AWQ those of group g from row n on.
inline GroupsArgs int4_groups(const Int4Weight &weight, int64_t n, int64_t g, int64_t count,
                              float *scales, float *zeros) {
  const Int4Place zero = int4_zero(weight.layout, weight.rows, weight.groups, n, g);
  return {static_cast<const uint16_t *>(weight.scales) +
              int4_scale(weight.layout, weight.rows, weight.groups, n, g),
          weight.scales_dtype == NF4_DTYPE_FP16,
          weight.zeros == nullptr ? nullptr : weight.zeros + zero.word,
          weight.zero_offset * kInt4Ones,
          weight.layout,
          zero.shift,
          count,
          scales,
          zeros};
}

}  // namespace nf4::cpu
