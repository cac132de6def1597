// What a dequantize kernel gets, and how a family of them is described. No CUDA types, so
// that the selection is ordinary C++.
#pragma once

#include <cstdint>

#include "cuda/family.hpp"
#include "nf4/nf4.h"

namespace nf4::cuda {

struct DequantArgs {
  const uint8_t *packed;
  const void *absmax;  // float if flat, uint8_t if nested
  const float *nested_absmax;
  const float *nested_code;
  const float *nested_offset;
  const float *codebook;  // NULL: the format's own
  void *out;
  int64_t elements;
  int64_t blocks;
  nf4_format format;
  int blocksize_log2;
  int nested_blocksize_log2;
  int shift;            // unaligned kernel: elements that the first vector lacks
  int prefetch_blocks;  // how many thread blocks ahead to prefetch; 0: not at all
  bool keep_output;     // leave the output in L2 for whoever reads it next
};

constexpr int kDequantThreads = 256;
constexpr int kDequantTile = 512;  // elements of a warp
constexpr int kDequantElementsPerBlock = kDequantThreads / 32 * kDequantTile;

struct DequantFamily {
  Family family;
  // [dtype - 1][nested][aligned]; each a kernel of one DequantArgs.
  const void *kernels[3][2][2];
};

extern const DequantFamily kDequantSm90;
extern const DequantFamily kDequantSm80;
extern const DequantFamily kDequantSm75;

}  // namespace nf4::cuda
