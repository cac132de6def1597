// What every matmul kernel gets. No device code: launches are ordinary C++.
#pragma once

#include <cstdint>

#include "core/rounding.hpp"
#include "cuda/runtime/launch.hpp"
#include "cuda/weight/view.hpp"
#include "nf4/nf4.h"
#include "problem.hpp"

namespace nf4::cuda {

struct MatmulArgs {
  WeightView weight;
  const void *x;
  const void *bias;  // or NULL
  void *y;
  int64_t m;
  int64_t x_stride;
  int64_t y_stride;
  bool x_vectors;    // rows of x are 16-byte aligned
  bool whole_words;  // cols is a multiple of 32 and packed 16-byte aligned: rows load as words
};

// Whether rows of x, of 16-bit elements, are 16-byte aligned.
inline bool has_x_vectors(const MatmulProblem &problem) {
  return is_multiple(problem.x, 16) && (problem.m == 1 || problem.x_stride % 8 == 0);
}

// A format's own codebook, rounded to x's dtype.
inline RoundedCodebook rounded_codebook(nf4_format format, nf4_dtype dtype) {
  if (format == NF4_FORMAT_FP4) return dtype == NF4_DTYPE_BF16 ? kFp4InBf16 : kFp4InHalf;
  return dtype == NF4_DTYPE_BF16 ? kNf4InBf16 : kNf4InHalf;
}

// The same in fp16, of unit 1: for weights that are scaled before they are rounded.
inline RoundedCodebook codebook_with_one(nf4_format format) {
  return format == NF4_FORMAT_FP4 ? kFp4InHalfWithOne : kNf4InHalfWithOne;
}

}  // namespace nf4::cuda
