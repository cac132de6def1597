// The dequantize kernels: what they are given, and where they are listed. Plain data and
// declarations only: the files that implement them are compiled for one instruction set each, and
// an inline function that they shared with the rest of the library might be linked in their
// version of it, for every machine. So in quantize/kernels.hpp and matmul/kernels.hpp.
#pragma once

#include <cstdint>

#include "cpu/isa/step.hpp"

namespace nf4::cpu {

// Dequantizes `elements`, a multiple of kKernelStep, the first of them at the start of a block or,
// if they are all of one block, anywhere in it. A NaN in codebook or scales is canonical: of its
// mantissa the highest bit alone is set.
struct DequantArgs {
  const float *codebook;  // 16
  const uint8_t *packed;
  const float *scales;  // one per block
  int64_t elements;
  int64_t blocksize;
  void *out;
};

struct DequantKernels {
  void (*dequant[3])(const DequantArgs &args);  // by dtype, in the order of nf4.h
  // Copies lines of 64 bytes, by stores that bypass the caches, to a multiple of 64.
  void (*store_nontemporal)(char *to, const char *from, int64_t lines);
};

extern const DequantKernels kAvx2Dequant;
extern const DequantKernels kAvx512Dequant;

}  // namespace nf4::cpu
