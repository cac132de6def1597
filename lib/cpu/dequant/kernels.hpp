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
// mantissa the highest bit alone is set. Integer weights have groups for blocks.
struct DequantArgs {
  const float *codebook;  // 16
  const uint8_t *packed;
  const float *scales;  // one per block
  int64_t elements;
  int64_t blocksize;
  void *out;
  const float *zeros = nullptr;  // of integer weights, one per group: what is added to an entry
};

// Words of integer weights, to be brought into rows of codes along the columns, of which the first
// is the low nibble, as compressed-tensors has them.
struct WordsArgs {
  const uint32_t *words;
  int64_t stride;  // from one row of words to the next
  int64_t rows;    // of the weight; in AWQ a multiple of 8
  int64_t cols;    // in GPTQ a multiple of 8
  uint8_t *out;    // for rows and cols up to a multiple of 16 and of kWordsCols
  int64_t out_stride;
  // Of words of GPTQ to make: where column i of `cols`, a multiple of 8, is; negative where there
  // is none. NULL: in order.
  const int16_t *columns = nullptr;
};
constexpr int64_t kWordsCols = 128;

// Scales and zeros of groups of a row of compressed-tensors, or of rows of a group of GPTQ or AWQ,
// as numbers: the scales, and 8 less the zero points. Outputs have room up to a multiple of 16.
struct GroupsArgs {
  const uint16_t *scales;
  bool fp16;              // else bf16
  const uint32_t *zeros;  // the word of the first, or NULL: 8
  uint32_t zero_offset;   // what is added to words of GPTQ
  int layout;             // of nf4.h
  int shift;              // compressed-tensors: of the row in words
  int64_t count;
  float *scales_out;
  float *zeros_out;
};

struct DequantKernels {
  void (*dequant[3])(const DequantArgs &args);  // by dtype, in the order of nf4.h
  void (*int4[3])(const DequantArgs &args);     // the first of two codes is the low nibble
  void (*groups)(const GroupsArgs &args);
  // To words of GPTQ, of whole words of columns; and to rows of codes.
  void (*gptq_words)(const WordsArgs &args);
  void (*awq_words)(const WordsArgs &args);
  void (*awq_from_gptq)(const WordsArgs &args);  // of multiples of 128 rows
  void (*gptq_rows)(const WordsArgs &args);      // and back, rows of codes taken for rows of words
  void (*awq_rows)(const WordsArgs &args);
  // Copies lines of 64 bytes, by stores that bypass the caches, to a multiple of 64. NULL where the
  // processor does so by itself.
  void (*store_nontemporal)(char *to, const char *from, int64_t lines);
};

extern const DequantKernels kAvx2Dequant;
extern const DequantKernels kAvx512Dequant;
extern const DequantKernels kNeonDequant;

}  // namespace nf4::cpu
