// The arguments that all matmul kernels share. No device code: launches are ordinary C++.
#pragma once

#include <cstdint>

#include "core/formats.hpp"
#include "cuda/lora/args.hpp"
#include "cuda/weight/int4_view.hpp"
#include "cuda/weight/view.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// `View` is that of a kind of weight.
template <class View>
struct MatmulArgsOf {
  View weight;
  const void *x;
  const void *bias;  // or NULL
  void *y;
  int64_t m;
  int64_t x_stride;
  int64_t y_stride;
  bool x_vectors;    // rows of x are 16-byte aligned
  bool whole_words;  // cols is a multiple of 32 and packed 16-byte aligned: rows load as words
};
struct MatmulArgs : MatmulArgsOf<WeightView> {
  LoraTerm lora;  // for epilogues that add it
};
using Int4MatmulArgs = MatmulArgsOf<Int4View>;

// Whether rows of x are 16-byte aligned.
template <class W>
bool has_x_vectors(const MatmulProblemOf<W> &problem) {
  return is_multiple(problem.x, 16) &&
         (problem.m == 1 || problem.x_stride * element_bytes(problem.dtype) % 16 == 0);
}

// The format's own codebook, rounded to x's dtype of 16 bits.
inline const RoundedCodebook &rounded_codebook(const WeightView &weight, nf4_dtype dtype) {
  const Format &format = kFormats[weight.format_row];
  return dtype == NF4_DTYPE_BF16 ? format.bf16 : format.fp16;
}

}  // namespace nf4::cuda
