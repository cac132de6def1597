// Which dequantize kernel of integer weights runs.
#pragma once

#include "problem.hpp"

namespace nf4::cuda {

// Can the layout's aligned kernel do it? Else the one for any weight does.
bool is_aligned(const Int4DequantProblem &problem);

// For tests: the kernel for any weight in every later launch. Not thread safe.
void force_int4_dequant_any(bool any);

}  // namespace nf4::cuda
