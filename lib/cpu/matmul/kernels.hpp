// The matmul kernels: what they are given, and where they are listed. Declarations only
// (dequant/kernels.hpp says why).
#pragma once

#include <cstdint>

#include "cpu/isa/step.hpp"

namespace nf4::cpu {

// A kernel adds sums of products to `sums`: of n rows of the weight with m rows of x. The order of
// such a sum depends on `elements` alone, not on n and m.

// Rows of codes times prepared x. Both consist of whole units.
struct DotArgs {
  const void *codebook;  // 16 numbers of the kernels' dtype, all finite
  const uint8_t *packed;
  int64_t row_bytes;  // from one row of codes to the next
  const float *scales;
  int64_t scale_stride;  // from one row of scales to the next
  int scales_per_unit;   // 1, 2 or 4
  const void *x;         // prepared
  int64_t x_stride;      // from one row to the next, in elements
  int64_t elements;      // a multiple of the unit
  int n;
  int m;
  float *sums;  // [m][sums_stride]
  int64_t sums_stride;
  // Of dot_zeros: what is added to each entry, like the scales, and the sums of x that x_sums()
  // makes.
  const float *zeros = nullptr;
  const float *x_sums = nullptr;
  int64_t x_sums_stride = 0;
};
constexpr int kMaxDotM = 4;
// What is readable beyond the end of the scales and the zeros.
constexpr int kScalePadding = 8;

// Words to prefetch while others are multiplied: one for each row of words and each vector of rows.
struct Ahead {
  const uint32_t *words;
  int64_t stride;  // for the next row of words
  int64_t step;    // for the next vector
};

// Words of GPTQ or AWQ of the columns of some groups, times x in the kernels' dtype: in bf16 and
// GPTQ, the columns i and i + 4 of a word are side by side.
struct ColumnsArgs {
  const void *codebook;   // 16 numbers of the kernels' dtype
  const uint32_t *words;  // of the first row and column
  int64_t stride;         // from one row of words to the next
  int64_t rows;           // in AWQ a multiple of 8
  int64_t cols;           // of a group, a multiple of 8
  int groups;
  // In the weight.
  const uint16_t *scales;
  bool fp16_scales;       // else bf16
  const uint32_t *zeros;  // with x_sums
  int64_t zero_stride;
  uint32_t zero_offset;  // what is added to words of GPTQ
  // Of a block, which are readable up to a multiple of 16 rows as its words are: 8 less the zeros.
  const float *block_scales;
  const float *block_zeros;
  Ahead next;
  int64_t scale_stride;  // from one group to the next
  const void *x;
  int64_t x_stride;
  int m;                // kMaxDotM at most, but of a block
  const float *x_sums;  // of the columns of a group, [m][x_sums_stride]; NULL: zeros are 8
  int64_t x_sums_stride;
  // [m][sums_stride], of AWQ [m][8][nibble_stride]: up to a multiple of 16 rows or words.
  float *sums;
  int64_t sums_stride;
  int64_t nibble_stride;
};

// Words of GPTQ times x, to sums by groups.
constexpr int kMaxScatteredM = 2;
struct ScatteredArgs {
  const void *codebook;   // 16 numbers of the kernels' dtype
  const uint32_t *words;  // of the first row and column
  int64_t stride;         // from one row of words to the next
  int64_t rows;
  int64_t cols;           // a multiple of 8
  const int32_t *groups;  // of each column
  const void *x;          // [m][x_stride]; in bf16 each number between zeros
  int64_t x_stride;       // in elements
  int m;
  float *sums;  // [m][groups], readable and writable up to a multiple of 16 rows
  int64_t group_stride;
  int64_t sums_stride;
  Ahead next;
};

// Transposed codes times x, for some rows of the weight, a lane each, and columns.
constexpr int kLaneBlockN = 32;
constexpr int kMaxLaneM = 12;
constexpr int kCodesPerWord = 8;
struct LanesArgs {
  const void *codebook;   // 16 numbers of the kernels' dtype
  const uint32_t *codes;  // [elements / 8][kLaneBlockN], as transpose_codes() makes them
  const float *scales;    // [elements / per_scale][kLaneBlockN]
  int64_t per_scale;
  const void *x;  // [elements / 8][m][8], each 8 as pair_for_lanes() makes them
  int64_t elements;
  int n;  // a multiple of a vector of sums
  int m;
  float *sums;  // [m][sums_stride]
  int64_t sums_stride;
  // Packed codes of the next rows or columns, of each row as many as these; or NULL.
  const uint8_t *next;
  int64_t row_bytes;
  // What is added to each entry, like the scales, and the sums of x, [m][x_sums_stride]; or NULL.
  const float *zeros;
  const float *x_sums;
  int64_t x_sums_stride;
};

// Dense rows of the weight times x.
struct TileArgs {
  const void *w;
  int64_t w_stride;  // in elements
  const void *x;
  int64_t x_stride;
  int64_t elements;  // a multiple of kKernelStep
  int n;
  int m;
  float *sums;  // [m][sums_stride]
  int64_t sums_stride;
};

// Dense rows of the weight, added up with factors: the sums are of rows of x, and of columns of the
// weight.
constexpr int kOuterColumns = 128;
constexpr int kOuterM = 6;
struct OuterArgs {
  const void *w;     // rows, or in bf16 pairs of rows, element by element side by side
  int64_t w_stride;  // from one row or pair to the next, in elements
  const void *x;     // [m][rows]
  int64_t x_stride;
  int rows;     // in bf16 an even number
  int columns;  // a multiple of kOuterColumns
  int m;
  float *sums;  // [m][sums_stride]
  int64_t sums_stride;
};

// The kernels that form products in one dtype; arrays are by the dtype of x, in the order of
// nf4.h, with NULL for those that are not for this set.
struct MatmulKernels {
  int dtype;          // NF4_DTYPE_FP32 or NF4_DTYPE_BF16
  int unit;           // elements: 64 or 128
  int tile_m;         // rows of x that are best done together: 6 at most
  int tile_elements;  // of a row that are best done together: 4096 bytes of fp32, 8192 of bf16
  int max_dot_m;      // the largest m for which dot is the faster way
  int max_columns_m;  // and for which columns are
  int sum_lanes;      // floats that x_sums() makes of a unit
  int column_lanes;   // rows of the weight that columns take together
  // Brings whole units of x into the order in which dot meets the codes, of which the first is the
  // high nibble, or the low one.
  void (*prepare[3])(const void *x, int64_t elements, void *out);
  void (*prepare_low_first[3])(const void *x, int64_t elements, void *out);
  void (*dot)(const DotArgs &args);
  void (*dot_zeros)(const DotArgs &args);
  // The sums of whole units of prepared x, a vector each.
  void (*x_sums)(const void *x, int64_t elements, float *sums);
  // Bring whole steps of x, of this set's dtype, into the order of gptq_columns, or NULL; and sum
  // `count` parts of so many columns, which are `stride` elements from one another.
  void (*pair_columns)(const void *x, int64_t elements, void *out);
  void (*column_sums)(const void *x, int64_t stride, int64_t cols, int64_t count, float *sums);
  void (*gptq_columns)(const ColumnsArgs &args);
  void (*awq_columns)(const ColumnsArgs &args);    // NULL where blocks are better
  void (*block_columns)(const ColumnsArgs &args);  // words as of GPTQ
  void (*scattered_columns)(const ScatteredArgs &args);
  // Converts whole steps of x; NULL where x is of this set's dtype.
  void (*convert[3])(const void *x, int64_t elements, void *out);
  void (*tile)(const TileArgs &args);
  void (*outer)(const OuterArgs &args);
  // Whole steps of two rows, element by element side by side; NULL where rows are single.
  void (*pair_rows)(const void *a, const void *b, int64_t elements, void *out);
  // What lanes, which is for more rows of x than dot, takes; NULL where there is no such way. Words
  // of codes of 16 rows, or of fewer and zeros, a word of a row to a lane. Scales of 16 rows
  // likewise. Both in whole multiples of 16 words or scales. Whole steps of x in the order in which
  // the kernel meets the codes, of which the first is the high nibble, or the low one: 8 columns,
  // and the next 8 `stride` elements from there.
  void (*transpose_codes)(const uint8_t *packed, int64_t row_bytes, int rows, int64_t words,
                          uint32_t *out) = nullptr;
  void (*transpose_scales)(const float *scales, int64_t stride, int64_t count,
                           float *out) = nullptr;
  void (*pair_for_lanes)(const void *x, int64_t elements, bool high_first, void *out,
                         int64_t stride) = nullptr;
  // The scales of a nested block or of a part of it.
  void (*nested_scales)(const uint8_t *codes, int64_t count, const float *table, float absmax,
                        float offset, float *out) = nullptr;
  void (*lanes)(const LanesArgs &args) = nullptr;
};

extern const MatmulKernels kAvx2Matmul;
extern const MatmulKernels kAvx512Matmul;
extern const MatmulKernels kAvx512Bf16Matmul;
extern const MatmulKernels kNeonMatmul;
extern const MatmulKernels kNeonBf16Matmul;

}  // namespace nf4::cpu
