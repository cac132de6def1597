// What a dequantize kernel gets, and how a family of them is described. No CUDA types, so
// that the selection is ordinary C++.
#pragma once

#include <cstdint>

#include "core/macros.hpp"
#include "cuda/runtime/family.hpp"
#include "cuda/weight/view.hpp"
#include "nf4/nf4.h"

namespace nf4::cuda {

struct DequantArgs {
  WeightView weight;
  void *out;
  int64_t elements;
  int64_t blocks;
  int shift;         // unaligned kernel: elements that the first vector lacks
  bool prefetch;     // packed and absmax are on 16-byte boundaries
  bool keep_output;  // leave the output in L2 for whoever reads it next
};

// Which of a family's kernels: for any alignment, or with two ways to cut aligned ones.
enum DequantShape { kUnaligned, kWide, kTall };
constexpr int kDequantShapes = 3;

// How a kernel cuts its work: a tile is what a warp takes.
struct DequantLayout {
  int threads;   // of a thread block
  int tile;      // elements
  int resident;  // threads that a multiprocessor should hold, which limits their registers

  NF4_HOST_DEVICE constexpr int elements() const { return threads / 32 * tile; }
};

// Wide has most thread blocks in flight; tall tiles start half as often for as many elements.
NF4_HOST_DEVICE constexpr DequantLayout dequant_layout(DequantShape shape) {
  if (shape == kUnaligned) return {256, 512, 1024};
  if (shape == kWide) return {256, 512, 2048};
  return {128, 1024, 2048};
}

// The weights, in elements, for which tall is the faster on an H200: the sweep of
// tests/bench/NOTES.md.
struct ElementRange {
  int64_t above;
  int64_t up_to;
};
constexpr ElementRange tall_range(int element_bytes) {
  if (element_bytes == 4) return {int64_t{3} << 20, int64_t{16} << 20};
  return {int64_t{5} << 20, int64_t{32} << 20};
}

struct DequantFamily {
  Family family;
  // [dtype - 1][nested][shape]: DequantArgs
  const void *kernels[3][2][kDequantShapes];
};

extern const DequantFamily kDequantSm90;
extern const DequantFamily kDequantSm80;
extern const DequantFamily kDequantSm75;

}  // namespace nf4::cuda
