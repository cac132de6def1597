// The arguments of the dequantize kernels, and the tables that list the kernels. This header has
// plain data and declarations only. The files that implement the kernels are compiled for one
// instruction set each; if they shared an inline function with the rest of the library, the linker
// might keep their version of it for every machine. quantize/kernels.hpp and matmul/kernels.hpp
// follow the same rule.
#pragma once

#include <cstdint>

#include "cpu/isa/step.hpp"

namespace nf4::cpu {

// Dequantizes `elements`, a multiple of kKernelStep. The first element begins a block, unless all
// of them are in one block. A NaN in the codebook or the scales is canonical: only the highest bit
// of its mantissa is set. For integer weights, groups take the place of blocks.
struct DequantArgs {
  const float *codebook;  // 16 entries
  const uint8_t *packed;
  const float *scales;  // one per block
  int64_t elements;
  int64_t blocksize;
  void *out;
  const float *zeros = nullptr;  // for integer weights, one per group: added to each entry
};

// Turns words of integer weights into rows of codes along the columns. The first code of a byte is
// the low nibble, as in compressed-tensors.
struct WordsArgs {
  const uint32_t *words;
  int64_t stride;  // from one row of words to the next
  int64_t rows;    // rows of the weight; in AWQ a multiple of 8
  int64_t cols;    // in GPTQ a multiple of 8
  uint8_t *out;    // room for rows and cols up to a multiple of 16 and of kWordsCols
  int64_t out_stride;
  // Used to make words of GPTQ: the source column of each of `cols` (a multiple of 8) columns;
  // negative if there is none. NULL: columns stay in order.
  const int16_t *columns = nullptr;
};
constexpr int64_t kWordsCols = 128;

// Converts scales and zeros to numbers: the scales, and 8 minus the zero points. They are those of
// the groups of one row of compressed-tensors, or of the rows of one group of GPTQ or AWQ. Outputs
// have room up to a multiple of 16.
struct GroupsArgs {
  const uint16_t *scales;
  bool fp16;              // otherwise bf16
  const uint32_t *zeros;  // the word of the first zero, or NULL: all are 8
  uint32_t zero_offset;   // added to words of GPTQ
  int layout;             // a layout of nf4.h
  int shift;              // compressed-tensors: the place of the row in its words
  int64_t count;
  float *scales_out;
  float *zeros_out;
};

struct DequantKernels {
  void (*dequant[3])(const DequantArgs &args);  // indexed by dtype, in the order of nf4.h
  void (*int4[3])(const DequantArgs &args);     // the low nibble is the first of two codes
  void (*groups)(const GroupsArgs &args);
  // Turn rows of codes into words of GPTQ, in whole words of columns, and words into rows of codes.
  void (*gptq_words)(const WordsArgs &args);
  void (*awq_words)(const WordsArgs &args);
  void (*awq_from_gptq)(const WordsArgs &args);  // for multiples of 128 rows
  // The inverse, with rows of codes in place of rows of words.
  void (*gptq_rows)(const WordsArgs &args);
  void (*awq_rows)(const WordsArgs &args);
  // Copies lines of 64 bytes with stores that bypass the caches. `to` is a multiple of 64. NULL if
  // the processor does that by itself.
  void (*store_nontemporal)(char *to, const char *from, int64_t lines);
};

extern const DequantKernels kAvx2Dequant;
extern const DequantKernels kAvx512Dequant;
extern const DequantKernels kNeonDequant;

}  // namespace nf4::cpu
