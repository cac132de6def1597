// What the dequantize kernels of integer weights get. No CUDA types.
#pragma once

#include <cstdint>

#include "cuda/runtime/fast_divide.hpp"
#include "cuda/weight/int4_view.hpp"

namespace nf4::cuda {

// The aligned kernels write runs of 8 columns, and strips of 8 runs, which lie in one group.
constexpr int kInt4StripColumns = 64;
constexpr int kGptqTileRows = 16;
constexpr int kAwqTileRows = 32;
constexpr int kRowPackedTileStrips = 16;

// What a CTA of the kernel for any weight has.
constexpr int kInt4AnyColumns = 32;
constexpr int kInt4AnyRows = 64;

constexpr int kInt4DequantThreads = 256;

struct Int4DequantArgs {
  Int4View weight;
  void *out;
  bool keep_output;  // leave the output in L2 for whoever reads it next
  // Of the aligned kernels.
  bool prefetch;               // packed is on a 16-byte boundary
  uint32_t strips;             // of a row in GPTQ and AWQ; of the weight in compressed-tensors
  uint32_t warps;              // tiles
  WideDivisor strip_divisor;   // by the strips of a row
  WideDivisor group_divisor;   // by the strips of a group
  WideDivisor groups_divisor;  // by the groups of a row
};

}  // namespace nf4::cuda
