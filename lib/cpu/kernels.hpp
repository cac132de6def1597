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

// ---- Matmul --------------------------------------------------------------------------
// A kernel adds sums of products to `sums`. The order of such a sum depends on `elements`
// alone, not on how many rows and columns are done together.

// Rows of codes times columns of x, which is prepared. All are cut into units.
struct DotRun {
  const void *codebook;  // 16 numbers of the kernels' dtype, all finite
  const uint8_t *packed;
  int64_t row_bytes;  // from one row of codes to the next
  const float *scales;
  int64_t scale_stride;  // from one row of scales to the next
  int scales_per_unit;   // 1, 2 or 4
  const void *x;         // prepared
  int64_t x_stride;      // from one column to the next, in elements
  int64_t elements;      // a multiple of the unit
  int rows;
  int m;
  float *sums;  // [m][sums_stride]
  int64_t sums_stride;
};
constexpr int kMaxDotColumns = 4;
// What is readable beyond the end of the scales.
constexpr int kScalePadding = 8;

// Dense rows of the weight times columns of x.
struct TileRun {
  const void *w;
  int64_t w_stride;  // in elements
  const void *x;
  int64_t x_stride;
  int64_t elements;  // a multiple of kKernelStep
  int rows;
  int m;
  float *sums;  // [m][sums_stride]
  int64_t sums_stride;
};

// The kernels that form products in one dtype; arrays are by the dtype of x, in the order of
// nf4.h, with NULL for those that are not for this set.
struct MatmulKernels {
  int dtype;          // NF4_DTYPE_FP32 or NF4_DTYPE_BF16
  int unit;           // elements: 64 or 128
  int tile_columns;   // of x that are best done together: 6 at most
  int tile_elements;  // of a row that are best done together: 4096 bytes of fp32, 8192 of bf16
  int max_dot_m;      // the largest m for which dot is the faster way
  // Brings whole units of x into the order in which dot meets the codes.
  void (*prepare[3])(const void *x, int64_t elements, void *out);
  void (*dot)(const DotRun &run);
  // Converts whole steps of x; NULL where x is of this set's dtype.
  void (*convert[3])(const void *x, int64_t elements, void *out);
  void (*tile)(const TileRun &run);
};

extern const MatmulKernels kAvx2Matmul;
extern const MatmulKernels kAvx512Matmul;
extern const MatmulKernels kAvx512Bf16Matmul;

}  // namespace nf4::cpu
