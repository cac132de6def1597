// Turns a dtype at run time into a type at compile time.
#pragma once

#include "core/float16.hpp"
#include "nf4/nf4.h"

namespace nf4::cpu {

// Calls visit(T{}) with the element type of `dtype`, which has been validated.
template <class Visit>
void with_dtype(nf4_dtype dtype, Visit visit) {
  if (dtype == NF4_DTYPE_FP32) return visit(float{});
  if (dtype == NF4_DTYPE_FP16) return visit(Half{});
  return visit(BFloat16{});
}

}  // namespace nf4::cpu
