// The arguments of the dequantize kernels of integer weights. No CUDA types.
#pragma once

#include <cstdint>

#include "cuda/runtime/fast_divide.hpp"
#include "cuda/weight/int4_view.hpp"

namespace nf4::cuda {

// The aligned kernels write runs of 8 columns; 64 columns lie in one group.
constexpr int kInt4StripColumns = 64;

// The tile of a CTA of an aligned kernel.
struct Int4Tiling {
  int threads;
  int rows;  // compressed-tensors: 1
  int columns;
};
constexpr Int4Tiling kGptqTiling = {512, 64, 128};
constexpr Int4Tiling kAwqTiling = {512, 256, 64};
constexpr Int4Tiling kRowPackedTiling = {256, 1, 8 * 16 * kInt4StripColumns};  // from row to row

// The tile of a CTA of the kernel for any weight.
constexpr int kInt4AnyColumns = 32;
constexpr int kInt4AnyRows = 64;

constexpr int kInt4AnyThreads = 256;

struct Int4DequantArgs {
  Int4View weight;
  void *out;
  bool keep_output;  // leave the output in L2 for the kernel that reads it next
  // The fields below are for the aligned kernels.
  uint32_t column_tiles;       // per row
  WideDivisor tile_divisor;    // divides by column_tiles
  WideDivisor group_divisor;   // divides by the strips of a group
  WideDivisor groups_divisor;  // divides by the groups of a row; compressed-tensors
  uint32_t strips;             // in the weight; compressed-tensors
  int64_t prefetch;            // rows ahead (compressed-tensors: words) to prefetch into L2
};

}  // namespace nf4::cuda
