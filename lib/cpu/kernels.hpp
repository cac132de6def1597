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

// Quantizes blocks of `blocksize` elements each.
struct QuantizeRun {
  const float *thresholds;  // 15: what exceeds one exceeds all before it
  const uint8_t *codes;     // 16, by rank
  const void *in;
  int64_t blocks;
  int64_t blocksize;
  float *absmax;  // one per block
  uint8_t *packed;
};

// The kernels of an instruction set; arrays are by dtype, in the order of nf4.h.
struct KernelSet {
  void (*dequant[3])(const DequantRun &run);
  // Copies lines of 64 bytes to an address that is a multiple of 64, past the caches.
  void (*stream)(char *to, const char *from, int64_t lines);
  void (*quantize[3])(const QuantizeRun &run);
};

extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvx512Kernels;

}  // namespace nf4::cpu
