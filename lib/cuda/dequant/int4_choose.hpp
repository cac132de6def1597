// Chooses the dequantize kernel of integer weights. No CUDA types.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/dequant/int4_args.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// Tells whether the parts are aligned for an aligned kernel, which loads several elements at once.
inline bool has_aligned_parts(const Int4Weight &weight) {
  switch (weight.layout) {
    case NF4_INT4_GPTQ:
      return weight.rows % 2 == 0 && is_multiple(weight.packed, 8) && is_multiple(weight.scales, 4);
    case NF4_INT4_AWQ:
      return weight.rows % 32 == 0 && is_multiple(weight.packed, 16) &&
             is_multiple(weight.scales, 8);
    default:
      return true;
  }
}

// Tells whether the layout's aligned kernel can dequantize the weight to an output on a 16-byte
// boundary. Otherwise the kernel for any weight runs, which takes several times as long
// (docs/design/dequant.md).
inline bool can_align(const Int4Weight &weight) {
  return weight.group_size % kInt4StripColumns == 0 && weight.g_idx == nullptr &&
         weight.permutation == nullptr && std::max(weight.rows, weight.cols) <= INT32_MAX &&
         weight.elements / kInt4StripColumns <= INT32_MAX && has_aligned_parts(weight);
}

bool is_aligned(const Int4DequantProblem &problem);

// For tests: makes every later launch use the kernel for any weight. Not thread safe.
void force_int4_dequant_any(bool any);

}  // namespace nf4::cuda
