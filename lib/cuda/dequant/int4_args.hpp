// What the dequantize kernels of integer weights get. No CUDA types.
#pragma once

#include <cstdint>

#include "cuda/runtime/fast_divide.hpp"
#include "cuda/weight/int4_view.hpp"

namespace nf4::cuda {

// The aligned kernels write runs of 8 columns; 64 columns lie in one group.
constexpr int kInt4StripColumns = 64;

// What a CTA of an aligned kernel has.
struct Int4Tiling {
  int threads;
  int rows;  // compressed-tensors: 1
  int columns;
};
constexpr Int4Tiling kGptqTiling = {512, 64, 128};
constexpr Int4Tiling kAwqTiling = {512, 256, 64};
constexpr Int4Tiling kRowPackedTiling = {256, 1, 8 * 16 * kInt4StripColumns};  // from row to row

// What a CTA of the kernel for any weight has.
constexpr int kInt4AnyColumns = 32;
constexpr int kInt4AnyRows = 64;

constexpr int kInt4AnyThreads = 256;

struct Int4DequantArgs {
  Int4View weight;
  void *out;
  bool keep_output;  // leave the output in L2 for whoever reads it next
  // Of the aligned kernels.
  uint32_t column_tiles;       // of a row
  WideDivisor tile_divisor;    // by them
  WideDivisor group_divisor;   // by the strips of a group
  WideDivisor groups_divisor;  // by the groups of a row; compressed-tensors
  uint32_t strips;             // of the weight; compressed-tensors
  int64_t prefetch;            // rows ahead (compressed-tensors: words) to prefetch into L2
};

}  // namespace nf4::cuda
