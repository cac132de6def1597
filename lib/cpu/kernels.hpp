// What the vector kernels are given, and where they are listed. Plain data and
// declarations only: the files that implement them are compiled for one instruction set
// each, and an inline function that they shared with the rest of the library might be
// linked in their version of it, for every machine.
#pragma once

#include <cstdint>

namespace nf4::cpu {

// Elements come in multiples of this, so kernels have no tails: vector.cpp pads.
constexpr int kKernelStep = 32;

// Dequantizes `elements`, the first of them at the start of a block or, if they are all
// of one block, anywhere in it. A NaN in codebook or scales has no mantissa bit but the
// highest.
struct DequantRun {
  const float *codebook;  // 16
  const uint8_t *packed;
  const float *scales;  // one per block
  int64_t elements;
  int64_t blocksize;
  void *out;
};

// [-1, 1] in cells so narrow that each holds one threshold at most. Cell k, of -15..15, has
// the numbers that 15 times are nearest to k; its entry is the k modulo 32.
struct Cells {
  static constexpr int kPerUnit = 15;
  static constexpr int kEntries = 32;
  float thresholds[kEntries];
  // The code of what exceeds the threshold, and in the byte below that of what does not;
  // each in both nibbles.
  uint32_t codes[kEntries];
};

// Quantizes blocks of `blocksize` elements each.
struct QuantizeRun {
  const float *thresholds;  // 15: what exceeds one exceeds all before it
  const uint8_t *codes;     // 16, by rank
  const Cells *cells;       // the same; NULL where thresholds are closer than cells are wide
  const void *in;
  int64_t blocks;
  int64_t blocksize;
  float *absmax;  // one per block
  uint8_t *packed;
};

// Quantizes scales to 8 bits: a scale's code is the number of thresholds, but for the first,
// that RN(RN(scale - offset) * inverse) exceeds.
struct ScaleRun {
  const float *thresholds;  // 256: entry i must be exceeded for code i; ascending from the second
  const float *scales;
  int64_t count;
  float offset;
  float inverse;
  uint8_t *codes;
};

// The kernels of an instruction set; arrays are by dtype, in the order of nf4.h.
struct KernelSet {
  void (*dequant[3])(const DequantRun &run);
  // Copies lines of 64 bytes to an address that is a multiple of 64, past the caches.
  void (*stream)(char *to, const char *from, int64_t lines);
  void (*quantize[3])(const QuantizeRun &run);
  void (*encode_scales)(const ScaleRun &run);
};

extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvx512Kernels;

}  // namespace nf4::cpu
