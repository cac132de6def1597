// The description of a weight with a codebook that its kernels get. No CUDA types, so that
// arguments are filled in ordinary C++.
#pragma once

#include <cstdint>

#include "core/formats.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// The first member of each kernel's args. Everything that takes a `const WeightView &` on the
// device is inlined, so that its fields stay in the constant bank.
struct WeightView {
  const uint8_t *packed;
  const void *absmax;  // float if flat, uint8_t if nested
  const float *nested_absmax;
  const float *nested_code;
  const float *nested_offset;
  const float *codebook;  // NULL: the format's own codebook
  int64_t rows;
  int64_t cols;
  int32_t format_row;  // row of kFormats
  int32_t blocksize_log2;
  int32_t nested_blocksize_log2;  // -1 if flat
};

inline WeightView view_of(const Weight &weight) {
  return {weight.packed,
          weight.absmax,
          weight.nested_absmax,
          weight.nested_code,
          weight.nested_offset,
          weight.codebook,
          weight.rows,
          weight.cols,
          format_row(weight.format),
          weight.blocksize_log2,
          weight.nested_blocksize_log2};
}

}  // namespace nf4::cuda
