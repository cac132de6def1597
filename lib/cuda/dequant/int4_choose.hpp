// Chooses the dequantize kernel of integer weights that runs. No CUDA types.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/dequant/int4_args.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// An aligned kernel loads several elements of each part at once.
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

// Can the layout's aligned kernel dequantize the weight, to an output on 16 bytes? Else the one for
// any weight does, which takes up to four times as long.
inline bool can_align(const Int4Weight &weight) {
  return weight.group_size % kInt4StripColumns == 0 && weight.g_idx == nullptr &&
         weight.permutation == nullptr && std::max(weight.rows, weight.cols) <= INT32_MAX &&
         weight.elements / kInt4StripColumns <= INT32_MAX && has_aligned_parts(weight);
}

bool is_aligned(const Int4DequantProblem &problem);

// For tests: the kernel for any weight in every later launch. Not thread safe.
void force_int4_dequant_any(bool any);

}  // namespace nf4::cuda
