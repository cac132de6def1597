// The formats, a row each: the codebook of the 4-bit codes, and the same in 16 bits, rounded for
// matrix products so that the errors of many weights cancel (docs/formats.md). The 8-bit code of
// nested scales is here too. To add a format, add a row here and an NF4_FORMAT_* in nf4.h;
// CONTRIBUTING.md says where the bindings name it.
#pragma once

#include <array>
#include <cstdint>

#include "core/scale_bytes.hpp"
#include "nf4/nf4.h"

namespace nf4 {

constexpr int kMinBlocksize = 32;
constexpr int kMaxBlocksize = 4096;
constexpr int kCodebookSize = 16;
constexpr int kScaleCodeSize = 256;
using Codebook = std::array<float, kCodebookSize>;
using ScaleCode = std::array<float, kScaleCodeSize>;

// Entry i of a codebook is entries[i], the bits of a 16-bit float, times the unit. around_one below
// has bits of another kind.
struct RoundedCodebook {
  float unit;
  uint16_t entries[kCodebookSize];
};

struct Format {
  nf4_format id;
  const char *name;
  Codebook codebook;  // indexed by code
  RoundedCodebook bf16;
  RoundedCodebook fp16;
  // For weights that are rounded after they are multiplied by a scale, which may have 16 bits; 1 is
  // exact. This one, in fp16 with unit 1, is for weights in bf16.
  RoundedCodebook fp16_with_one;
  // The same for weights in fp16: bits 8 to 23 of the binary32 number 1 + entry / unit in [0.5, 2).
  // The other bits are those of 0.5.
  RoundedCodebook around_one;
  ScaleBytes scale_bytes = ScaleBytes::kNone;
};

// E2M1: a sign bit (code 8 is -0), two bits of exponent and one of mantissa. 16 bits hold all of
// it.
constexpr Format e2m1_format(nf4_format id, const char *name, ScaleBytes scale_bytes) {
  return {id,
          name,
          {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f,
           -4.0f, -6.0f},
          {1.0f,
           {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
            0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0}},
          {1.0f,
           {0x0000, 0x3800, 0x3c00, 0x3e00, 0x4000, 0x4200, 0x4400, 0x4600, 0x8000, 0xb800, 0xbc00,
            0xbe00, 0xc000, 0xc200, 0xc400, 0xc600}},
          {1.0f,
           {0x0000, 0x3800, 0x3c00, 0x3e00, 0x4000, 0x4200, 0x4400, 0x4600, 0x8000, 0xb800, 0xbc00,
            0xbe00, 0xc000, 0xc200, 0xc400, 0xc600}},
          {16.0f,
           {0x8000, 0x8400, 0x8800, 0x8c00, 0x9000, 0x9800, 0xa000, 0xb000, 0x8000, 0x7800, 0x7000,
            0x6800, 0x6000, 0x5000, 0x4000, 0x2000}},
          scale_bytes};
}

// tools/round_codebooks.py finds the 16-bit codebooks. The table shows the error of normal weights
// in blocks of 64, relative to their root mean square: its root mean square, its mean, and the
// largest mean for blocks of 32 to 4096.
//
//                       rounded to nearest            these
//   NF4, bf16           1.4e-03  4.6e-04  4.7e-04    1.0e-03 -8.0e-06  1.4e-05
//   NF4, fp16           1.8e-04 -2.9e-05  5.9e-05    1.1e-04  1.5e-07  3.0e-07
//   NF4, fp16, with 1   1.8e-04 -2.9e-05  5.9e-05    1.9e-04 -1.6e-06  6.9e-06
//   NF4, around 1       1.8e-04 -2.9e-05  5.9e-05    2.7e-05 -6.9e-07  1.0e-06
//   FP4, bf16           1.3e-03  0.0e+00  0.0e+00    2.0e-08  0.0e+00  0.0e+00
//   FP4, fp16           1.6e-04  0.0e+00  0.0e+00    2.0e-08  0.0e+00  0.0e+00
//   FP4, fp16, with 1   1.6e-04  0.0e+00  0.0e+00    1.6e-04  0.0e+00  0.0e+00
//   FP4, around 1       1.6e-04  0.0e+00  0.0e+00    2.0e-08  0.0e+00  0.0e+00
inline constexpr Format kFormats[] = {
    // A sign bit (code 8 is -0) and the magnitudes {0, 0.0625, 8, 12, 4, 6, 2, 3} of
    // bitsandbytes, divided by 12.
    {NF4_FORMAT_FP4,
     "FP4",
     {0.0f, 0.0625f / 12, 8.0f / 12, 1.0f, 4.0f / 12, 6.0f / 12, 2.0f / 12, 3.0f / 12, -0.0f,
      -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -6.0f / 12, -2.0f / 12, -3.0f / 12},
     {1 / 1.5f,
      {0x0000, 0x3c00, 0x3f80, 0x3fc0, 0x3f00, 0x3f40, 0x3e80, 0x3ec0, 0x8000, 0xbc00, 0xbf80,
       0xbfc0, 0xbf00, 0xbf40, 0xbe80, 0xbec0}},
     {1 / 1.5f,
      {0x0000, 0x2000, 0x3c00, 0x3e00, 0x3800, 0x3a00, 0x3400, 0x3600, 0x8000, 0xa000, 0xbc00,
       0xbe00, 0xb800, 0xba00, 0xb400, 0xb600}},
     {1 / 1.0f,
      {0x0000, 0x1d55, 0x3955, 0x3c00, 0x3555, 0x3800, 0x3155, 0x3400, 0x8000, 0x9d55, 0xb955,
       0xbc00, 0xb555, 0xb800, 0xb155, 0xb400}},
     {32768.0f / 8256,
      {0x8000, 0x802b, 0x9580, 0xa040, 0x8ac0, 0x9020, 0x8560, 0x8810, 0x8000, 0x7faa, 0x5500,
       0x3f80, 0x6a80, 0x5fc0, 0x7540, 0x6fe0}}},
    // Quantiles of the normal distribution: QLoRA (arXiv:2305.14314), appendix E.
    {NF4_FORMAT_NF4,
     "NF4",
     {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
      -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
      0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
      0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f},
     {1 / 1.7724609375f,
      {0xbfe3, 0xbf9e, 0xbf6e, 0xbf33, 0xbf01, 0xbea8, 0xbe25, 0x0000, 0x3e10, 0x3e92, 0x3ee0,
       0x3f19, 0x3f48, 0x3f7f, 0x3fa4, 0x3fe3}},
     {1 / 1.1845703125f,
      {0xbcbd, 0xba99, 0xb8fa, 0xb77c, 0xb564, 0xb301, 0xaee7, 0x0000, 0x2e09, 0x3219, 0x34aa,
       0x3668, 0x382d, 0x3955, 0x3ada, 0x3cbd}},
     {1 / 1.0f,
      {0xbc00, 0xb992, 0xb833, 0xb652, 0xb48d, 0xb1e9, 0xadd4, 0x0000, 0x2d18, 0x3126, 0x33e0,
       0x3568, 0x370d, 0x3880, 0x39c9, 0x3c00}},
     {32768.0f / 15871,
      {0x0402, 0x29ad, 0x3ee5, 0x4f09, 0x5cbb, 0x6917, 0x74b6, 0x8000, 0x84ef, 0x89fa, 0x8f42,
       0x94f3, 0x9b53, 0xa2e1, 0xacd2, 0xbdff}}},
#if defined(NF4_TEST_FORMAT)
    // A format for test builds, which only this table knows: 16 equal steps, descending.
    {NF4_TEST_FORMAT,
     "test",
     {15 / 15.0f, 13 / 15.0f, 11 / 15.0f, 9 / 15.0f, 7 / 15.0f, 5 / 15.0f, 3 / 15.0f, 1 / 15.0f,
      -1 / 15.0f, -3 / 15.0f, -5 / 15.0f, -7 / 15.0f, -9 / 15.0f, -11 / 15.0f, -13 / 15.0f,
      -15 / 15.0f},
     {16 / 15.0f,
      {0x3f70, 0x3f50, 0x3f30, 0x3f10, 0x3ee0, 0x3ea0, 0x3e40, 0x3d80, 0xbd80, 0xbe40, 0xbea0,
       0xbee0, 0xbf10, 0xbf30, 0xbf50, 0xbf70}},
     {16 / 15.0f,
      {0x3b80, 0x3a80, 0x3980, 0x3880, 0x3700, 0x3500, 0x3200, 0x2c00, 0xac00, 0xb200, 0xb500,
       0xb700, 0xb880, 0xb980, 0xba80, 0xbb80}},
     {1 / 1.0f,
      {0x3c00, 0x3aef, 0x39de, 0x38cd, 0x3777, 0x3555, 0x3266, 0x2c44, 0xac44, 0xb266, 0xb555,
       0xb777, 0xb8cd, 0xb9de, 0xbaef, 0xbc00}},
     {32768.0f / 16380,
      {0xbffc, 0xb774, 0xaeec, 0xa664, 0x9ddc, 0x9554, 0x8ccc, 0x8444, 0x7778, 0x6668, 0x5558,
       0x4448, 0x3338, 0x2228, 0x1118, 0x0008}}},
#endif
    e2m1_format(NF4_FORMAT_MXFP4, "MXFP4", ScaleBytes::kE8M0),
    e2m1_format(NF4_FORMAT_NVFP4, "NVFP4", ScaleBytes::kE4M3),
};

// Returns the row of a format, or -1.
constexpr int format_row(nf4_format id) {
  int row = -1;
  int i = 0;
  for (const Format &format : kFormats) {
    if (format.id == id) row = i;
    ++i;
  }
  return row;
}

// The rows whose scales are fp32 or nested come first.
constexpr int count_float_scaled() {
  int count = 0;
  for (const Format &format : kFormats) count += format.scale_bytes == ScaleBytes::kNone;
  return count;
}
constexpr int kFloatScaledFormats = count_float_scaled();
static_assert(kFormats[kFloatScaledFormats - 1].scale_bytes == ScaleBytes::kNone);

// The magnitudes below 1 of bitsandbytes' signed dynamic map, ascending. For i of 0..6 they are
// 10^(i - 6) times the midpoints of 2^i equal parts of [0.1, 1] (create_dynamic_map in
// bitsandbytes/functional.py), with torch's float32 rounding.
constexpr std::array<float, 127> kDynamicMapMagnitudes = {
    5.50000038e-07f, 3.25000019e-06f, 7.7499999e-06f,  2.12499981e-05f, 4.37499984e-05f,
    6.62500024e-05f, 8.87499991e-05f, 0.000156250011f, 0.000268750038f, 0.000381250022f,
    0.000493750034f, 0.000606250076f, 0.00071875006f,  0.000831249985f, 0.000943750085f,
    0.00128124992f,  0.00184375001f,  0.00240624999f,  0.00296874996f,  0.00353124971f,
    0.00409374991f,  0.00465624966f,  0.00521875033f,  0.00578125007f,  0.00634374982f,
    0.00690625003f,  0.00746874977f,  0.00803124998f,  0.00859375019f,  0.00915624946f,
    0.00971874967f,  0.0114062503f,   0.0142187504f,   0.0170312505f,   0.0198437516f,
    0.0226562507f,   0.0254687499f,   0.028281251f,    0.0310937501f,   0.0339062512f,
    0.0367187522f,   0.0395312496f,   0.0423437469f,   0.0451562516f,   0.047968749f,
    0.05078125f,     0.053593751f,    0.0564062484f,   0.0592187531f,   0.0620312504f,
    0.0648437515f,   0.0676562563f,   0.0704687461f,   0.0732812509f,   0.0760937482f,
    0.078906253f,    0.0817187577f,   0.0845312476f,   0.0873437524f,   0.0901562497f,
    0.0929687545f,   0.0957812592f,   0.0985937491f,   0.107031256f,    0.12109375f,
    0.135156244f,    0.149218753f,    0.163281247f,    0.177343756f,    0.19140625f,
    0.205468744f,    0.219531253f,    0.233593747f,    0.247656241f,    0.26171875f,
    0.275781274f,    0.289843738f,    0.303906262f,    0.317968726f,    0.33203125f,
    0.346093744f,    0.360156238f,    0.374218762f,    0.388281226f,    0.40234375f,
    0.416406244f,    0.430468738f,    0.444531262f,    0.458593726f,    0.47265625f,
    0.486718714f,    0.500781238f,    0.514843702f,    0.528906226f,    0.54296875f,
    0.557031274f,    0.571093798f,    0.585156262f,    0.599218726f,    0.61328125f,
    0.627343774f,    0.641406298f,    0.655468762f,    0.669531226f,    0.68359375f,
    0.697656274f,    0.711718798f,    0.725781262f,    0.739843726f,    0.75390625f,
    0.767968774f,    0.782031238f,    0.796093762f,    0.810156226f,    0.82421875f,
    0.838281274f,    0.852343738f,    0.866406262f,    0.880468726f,    0.89453125f,
    0.908593774f,    0.922656238f,    0.936718762f,    0.950781226f,    0.96484375f,
    0.978906274f,    0.992968738f};

// The whole map, ascending: -magnitudes, 0, +magnitudes, 1. It does not contain -1.
constexpr ScaleCode make_scale_code() {
  ScaleCode code{};
  for (int i = 0; i < 127; ++i) {
    code[126 - i] = -kDynamicMapMagnitudes[i];
    code[128 + i] = kDynamicMapMagnitudes[i];
  }
  code[127] = 0.0f;
  code[255] = 1.0f;
  return code;
}
constexpr ScaleCode kScaleCode = make_scale_code();

}  // namespace nf4
