// The arguments of a dequantize kernel. They use no CUDA types, so that the host side is ordinary
// C++.
#pragma once

#include <cstdint>

#include "cuda/weight/view.hpp"

namespace nf4::cuda {

struct DequantArgs {
  WeightView weight;
  void *out;
  int64_t elements;
  int64_t blocks;
  int shift;         // unaligned kernel: elements missing from the first vector
  bool prefetch;     // packed and absmax are on 16-byte boundaries
  bool keep_output;  // leave the output in L2 for the kernel that reads it next
};

}  // namespace nf4::cuda
