// The formats' codebooks in 16 bits, rounded so that the errors of many weights cancel.
//
// Rounded as they are, NF4's entries have errors whose mean is 4.6e-4 of the weights' root mean
// square in bf16. In a row of x that has a mean of its own it adds up with the columns, where what
// else there is of error adds up with their square root. So the codebook is multiplied by a factor
// before it is rounded, and products by its inverse, and a few entries are rounded away from the
// nearest: of the factors of four digits, and of all ways to round that err by no more than the
// dtype's half unit, those with the smallest mean square error and mean error. They are weighed for
// normal weights in blocks of every size, as weights of other distributions are like those of
// another blocksize. tools/round_codebooks.py finds them and prints the figures and tables below.
//
// Error of normal weights in blocks of 64, relative to their root mean square: its root mean
// square, and its mean, and the largest mean for blocks of 32 to 4096.
//
//                       rounded as it is              here
//   NF4, bf16           1.4e-03  4.6e-04  4.7e-04    1.0e-03 -8.0e-06  1.4e-05
//   NF4, fp16           1.8e-04 -2.9e-05  5.9e-05    1.1e-04  1.5e-07  3.0e-07
//   NF4, fp16, 1 kept   1.8e-04 -2.9e-05  5.9e-05    1.9e-04 -1.6e-06  6.9e-06
//   FP4, bf16           1.3e-03  0.0e+00  0.0e+00    2.0e-08  0.0e+00  0.0e+00
//   FP4, fp16           1.6e-04  0.0e+00  0.0e+00    2.0e-08  0.0e+00  0.0e+00
//   FP4, fp16, 1 kept   1.6e-04  0.0e+00  0.0e+00    1.6e-04  0.0e+00  0.0e+00
//
// FP4's entries times 1.5 are short: what is left is the rounding of the codebook itself.
//
// The tables in which 1 is kept are for weights that are rounded again, to bf16, when they have
// been multiplied by their scale. A scale that nothing has quantized is a number of 16 bits, and so
// is then the largest weight of each block.
#pragma once

#include <cstdint>

#include "core/formats.hpp"

namespace nf4 {

// Entry i of the codebook is entries[i], as a number of the dtype, times the unit.
struct RoundedCodebook {
  float unit;
  uint16_t entries[kCodebookSize];
};

constexpr RoundedCodebook kNf4InBf16 = {
    1 / 1.7724609375f,
    {0xbfe3, 0xbf9e, 0xbf6e, 0xbf33, 0xbf01, 0xbea8, 0xbe25, 0x0000, 0x3e10, 0x3e92, 0x3ee0, 0x3f19,
     0x3f48, 0x3f7f, 0x3fa4, 0x3fe3},
};
constexpr RoundedCodebook kNf4InHalf = {
    1 / 1.1845703125f,
    {0xbcbd, 0xba99, 0xb8fa, 0xb77c, 0xb564, 0xb301, 0xaee7, 0x0000, 0x2e09, 0x3219, 0x34aa, 0x3668,
     0x382d, 0x3955, 0x3ada, 0x3cbd},
};
constexpr RoundedCodebook kNf4InHalfWithOne = {
    1 / 1.0f,
    {0xbc00, 0xb992, 0xb833, 0xb652, 0xb48d, 0xb1e9, 0xadd4, 0x0000, 0x2d18, 0x3126, 0x33e0, 0x3568,
     0x370d, 0x3880, 0x39c9, 0x3c00},
};
constexpr RoundedCodebook kFp4InBf16 = {
    1 / 1.5f,
    {0x0000, 0x3c00, 0x3f80, 0x3fc0, 0x3f00, 0x3f40, 0x3e80, 0x3ec0, 0x8000, 0xbc00, 0xbf80, 0xbfc0,
     0xbf00, 0xbf40, 0xbe80, 0xbec0},
};
constexpr RoundedCodebook kFp4InHalf = {
    1 / 1.5f,
    {0x0000, 0x2000, 0x3c00, 0x3e00, 0x3800, 0x3a00, 0x3400, 0x3600, 0x8000, 0xa000, 0xbc00, 0xbe00,
     0xb800, 0xba00, 0xb400, 0xb600},
};
constexpr RoundedCodebook kFp4InHalfWithOne = {
    1 / 1.0f,
    {0x0000, 0x1d55, 0x3955, 0x3c00, 0x3555, 0x3800, 0x3155, 0x3400, 0x8000, 0x9d55, 0xb955, 0xbc00,
     0xb555, 0xb800, 0xb155, 0xb400},
};

}  // namespace nf4
