// The description of an integer weight that its kernels get. No CUDA types, so that arguments are
// filled in ordinary C++.
#pragma once

#include <cstdint>

#include "problem.hpp"

namespace nf4::cuda {

// The first member of each kernel's args, like WeightView. core/int4.hpp says where codes, zeros
// and scales lie.
struct Int4View {
  const uint32_t *packed;
  const uint16_t *scales;      // bits of fp16 or bf16
  const uint32_t *zeros;       // NULL: each zero is kInt4SymmetricZero
  const int32_t *g_idx;        // NULL: column / group_size
  const int32_t *permutation;  // NULL: the identity
  int64_t rows;
  int64_t cols;
  int64_t group_size;  // in columns; cols if there is one group
  int64_t groups;
  uint32_t zero_offset;
  nf4_int4_layout layout;
  bool fp16_scales;  // otherwise bf16
};

inline Int4View view_of(const Int4Weight &weight) {
  return {weight.packed,      static_cast<const uint16_t *>(weight.scales),
          weight.zeros,       weight.g_idx,
          weight.permutation, weight.rows,
          weight.cols,        weight.group_size,
          weight.groups,      weight.zero_offset,
          weight.layout,      weight.scales_dtype == NF4_DTYPE_FP16};
}

}  // namespace nf4::cuda
