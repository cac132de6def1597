// What a dequantize kernel gets, and how a family of them is described. No CUDA types, so
// that the selection is ordinary C++.
#pragma once

#include <cstdint>

#include "core/macros.hpp"
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
  int shift;         // unaligned kernel: elements that the first vector lacks
  bool prefetch;     // packed and absmax are on 16-byte boundaries
  bool keep_output;  // leave the output in L2 for whoever reads it next
};

constexpr int kDequantThreads = 256;

// Which of a family's kernels suits a problem.
enum DequantShape {
  kUnaligned,  // any alignment
  kWide,       // aligned, tiles of 512 elements a warp: most thread blocks in flight
  kTall,       // aligned, tiles of 1024: half as many instructions to get going; not fp32
};
constexpr int kDequantShapes = 3;

NF4_HOST_DEVICE constexpr int elements_per_block(DequantShape shape) {
  return kDequantThreads / 32 * (shape == kTall ? 1024 : 512);
}

struct DequantFamily {
  Family family;
  // [dtype - 1][nested][shape]; each a kernel of one DequantArgs.
  const void *kernels[3][2][kDequantShapes];
};

extern const DequantFamily kDequantSm90;
extern const DequantFamily kDequantSm80;
extern const DequantFamily kDequantSm75;

}  // namespace nf4::cuda
