// The arguments of the quantize kernels, and the tables that list the kernels. Declarations only
// (dequant/kernels.hpp says why).
#pragma once

#include <cstdint>

#include "cpu/isa/step.hpp"

namespace nf4::cpu {

// [-1, 1] in cells so narrow that each holds at most one threshold. Cell k, of -15..15, has the
// numbers whose product with 15 is nearest to k; its entry has the index k modulo 32.
struct Cells {
  static constexpr int kPerUnit = 15;
  static constexpr int kEntries = 32;
  float thresholds[kEntries];
  // The code of numbers above the threshold, and in the byte below it the code of the others; each
  // in both nibbles.
  uint32_t codes[kEntries];
};

// Quantizes blocks of `blocksize` elements each, a multiple of kKernelStep.
struct QuantizeArgs {
  const float *thresholds;  // 15: a number that exceeds one exceeds all before it
  const uint8_t *codes;     // 16, by rank
  const Cells *cells;       // the same; NULL if thresholds are closer than cells are wide
  const void *in;
  int64_t blocks;
  int64_t blocksize;
  float *absmax;  // one per block
  uint8_t *packed;
};

// Quantizes scales to 8 bits. A scale's code is the number of thresholds, except the first, that
// RN(RN(scale - offset) * inverse) exceeds.
struct EncodeScalesArgs {
  // 256: a scale must exceed entry i for code i; ascending from the second.
  const float *thresholds;
  const float *scales;
  int64_t count;
  float offset;
  float inverse;
  uint8_t *codes;
};

// Computes scales and zeros of kInt4Groups groups of integers from their ranges.
constexpr int kInt4Groups = 16;
struct Int4ScalesArgs {
  const float *low;
  const float *high;
  bool symmetric;
  bool fp16;       // otherwise bf16
  uint16_t *bits;  // the scales' bits
  float *scales;
  float *zeros;
};

// Quantizes elements of a group of integers, a multiple of kKernelStep, to a row of codes. The
// first code of a byte is the low nibble.
struct Int4CodesArgs {
  const void *in;
  int64_t elements;
  float scale;
  float zero;
  bool finite;  // every element is finite
  uint8_t *codes;
};

struct QuantizeKernels {
  void (*quantize[3])(const QuantizeArgs &args);  // indexed by dtype, in the order of nf4.h
  void (*encode_scales)(const EncodeScalesArgs &args);
  // Finds the range of 0 and of the finite ones among the elements, a multiple of kKernelStep.
  // Returns whether all are finite.
  bool (*int4_range[3])(const void *in, int64_t elements, float *low, float *high);
  void (*int4_scales)(const Int4ScalesArgs &args);
  void (*int4_codes[3])(const Int4CodesArgs &args);
};

extern const QuantizeKernels kAvx2Quantize;
extern const QuantizeKernels kAvx512Quantize;
extern const QuantizeKernels kNeonQuantize;

}  // namespace nf4::cpu
