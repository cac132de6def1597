// The arguments of the matmul kernels, and the table that lists the kernels. Declarations only
// (dequant/kernels.hpp says why).
#pragma once

#include <cstdint>

#include "cpu/isa/step.hpp"

namespace nf4::cpu {

// A kernel adds products of n rows of the weight with m rows of x to `sums`. The order of such a
// sum depends only on `elements`, not on n and m.

// Rows of codes times prepared x. Both consist of whole units.
struct DotArgs {
  const void *codebook;  // 16 numbers of DotKernels::codebook_dtype, all finite
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
  // For dot_zeros: the term that is added to each entry, like the scales, and the sums of x that
  // x_sums() computes.
  const float *zeros = nullptr;
  const float *x_sums = nullptr;
  int64_t x_sums_stride = 0;
};
constexpr int kMaxDotM = 4;

// A unit of one row of x as integers, in the order of prepared x. The numbers of a lane of 32 bits
// of `high` and `low`, two in each of their four vectors, have a scale: a number is high * scale,
// or (high + low / 2^15) * scale, exactly.
constexpr int kSplitUnit = 64;  // in elements
struct alignas(32) SplitUnit {
  int16_t high[kSplitUnit];
  float scales[8];
  int16_t low[kSplitUnit];
};

// A part of a row of x. The units that need no `low` follow `begin`, the others lie before `end`,
// in reverse; each has its number.
constexpr int kMaxSplitUnits = 112;
struct SplitX {
  SplitUnit *begin, *end;
  int whole_count, split_count;
  int16_t whole[kMaxSplitUnits], split[kMaxSplitUnits];
};

// The codebook of dot_split: numbers of bf16, divided by a unit that makes all of them integers.
struct SplitCodebook {
  int16_t entries[16];  // at most 2^13, so that the sum of 8 products has 32 bits
  float unit;           // a power of two; 0 if there is no such unit
  int largest;          // the magnitude of the largest entry
};

// Pairs of columns of a row of x as integers. A unit has 64 columns, and a scale. Each 8 columns
// are in the order in which a kernel decodes them. What the integers do not hold of a number is its
// rest.
constexpr int64_t kPairUnit = 64;
constexpr int64_t kUnitPairs = kPairUnit / 2;
struct PairOrder {
  uint8_t columns[8];
  uint8_t places[8];  // of the columns

  constexpr PairOrder(const uint8_t (&order)[8]) : columns(), places() {
    for (uint8_t i = 0; i < 8; ++i) {
      columns[i] = order[i];
      places[order[i]] = i;
    }
  }
};
constexpr PairOrder kRowPairs{{0, 2, 4, 6, 1, 3, 5, 7}};   // rows of codes: bytes side by side
constexpr PairOrder kGptqPairs{{0, 4, 1, 5, 2, 6, 3, 7}};  // the halves of a word
constexpr PairOrder kAwqPairs{{0, 1, 2, 3, 4, 5, 6, 7}};   // words of neighbouring columns
struct PairRest {
  float x;        // times the unit of the entries
  int16_t place;  // of the column in the order of pairs, from the first column on
  int16_t m;
};
struct SplitPairsArgs {
  const uint16_t *x;  // 64 numbers of bf16
  const PairOrder &order;
  int most;    // the most that the magnitudes of the integers may add up to, at least 2^19
  float unit;  // of the entries
  int16_t *out;
  float *scale;     // times the unit
  PairRest *rests;  // room for 64
  int16_t m;        // for the rests, as the place of the first column
  int16_t first_place;
};

// Codes of rows of the weight as integers, pair by pair, with a row for each lane.
constexpr int64_t kPairLanes = 16;
struct DecodePairsArgs {
  const int16_t *entries;  // of a SplitCodebook
  const uint8_t *packed;
  int64_t row_bytes;
  int rows;  // at most kPairLanes; other lanes get copies of the first row
  int units;
  const float *zeros;  // the integers that are added to entries, [scale][kPairLanes]; or NULL
  int scales_per_unit;
  int16_t *out;  // [pair][kPairLanes][2]
};
// The same for words of GPTQ or AWQ, in tiles of kPairLanes rows. A tile of AWQ has two nibbles of
// each of 8 words.
constexpr int64_t kWordTiles = 4;
struct DecodeWordPairsArgs {
  const uint32_t *words;
  int64_t stride;  // from one row of words to the next
  int64_t rows;    // at most kWordTiles * kPairLanes; other lanes get no code
  int64_t cols;    // a multiple of 8, at most `units` units
  int units;
  const float *zeros;  // the integers that are added to codes, [tile][scale][kPairLanes]
  int scales_per_unit;
  int16_t *out;  // [tile][pair][kPairLanes][2]
};
struct PairsArgs {
  const int16_t *codes;  // made by decode_pairs
  const float *scales;   // [scale][kPairLanes]
  int scales_per_unit;   // 1 or 2
  int units;
  const int16_t *x;       // [unit][m][kPairUnit]
  const float *x_scales;  // [unit][m]
  int m;
  const PairRest *rests;  // in these columns
  int rest_count;
  int first_place;
  float *sums;  // [m][sums_stride]
  int64_t sums_stride;
  // Packed codes of the next rows or columns, of the same number; or NULL.
  const uint8_t *next;
  int64_t row_bytes;
};
// The number of elements that are accessible beyond the end of the scales and the zeros.
constexpr int kScalePadding = 8;

// Words to prefetch while others are multiplied: one for each row of words and each vector of rows.
struct Ahead {
  const uint32_t *words;
  int64_t stride;  // for the next row of words
  int64_t step;    // for the next vector
};

// Words of GPTQ or AWQ of the columns of some groups, times x in the kernels' dtype. In bf16 and
// GPTQ, the columns i and i + 4 of a word are side by side.
struct ColumnsArgs {
  const void *codebook;   // 16 numbers of the kernels' dtype
  const uint32_t *words;  // at the first row and column
  int64_t stride;         // from one row of words to the next
  int64_t rows;           // in AWQ a multiple of 8
  int64_t cols;           // per group, a multiple of 8
  int groups;
  // Scales and zeros in the weight.
  const uint16_t *scales;
  bool fp16_scales;       // otherwise bf16
  const uint32_t *zeros;  // used with x_sums
  int64_t zero_stride;
  uint32_t zero_offset;  // added to words of GPTQ
  // Scales, and 8 minus the zero points, of a block; padded to 16 rows like the words.
  const float *block_scales;
  const float *block_zeros;
  Ahead next;
  int64_t scale_stride;  // from one group to the next
  const void *x;
  int64_t x_stride;
  int m;                // at most kMaxDotM, except in a block
  const float *x_sums;  // sums of x over each group, [m][x_sums_stride]; NULL: zeros are 8
  int64_t x_sums_stride;
  // [m][sums_stride], for AWQ [m][8][nibble_stride]; padded to a multiple of 16 rows or words.
  float *sums;
  int64_t sums_stride;
  int64_t nibble_stride;
};

// Words of GPTQ times x, summed by groups.
constexpr int kMaxScatteredM = 2;
struct ScatteredArgs {
  const void *codebook;   // 16 numbers of the kernels' dtype
  const uint32_t *words;  // at the first row and column
  int64_t stride;         // from one row of words to the next
  int64_t rows;
  int64_t cols;           // a multiple of 8
  const int32_t *groups;  // the group of each column
  const void *x;          // [m][x_stride]; in bf16 each number is between zeros
  int64_t x_stride;       // in elements
  int m;
  float *sums;  // [m][groups], readable and writable up to a multiple of 16 rows
  int64_t group_stride;
  int64_t sums_stride;
  Ahead next;
};

// Transposed codes times x, for some rows of the weight, one per lane, and some columns.
constexpr int kLaneBlockN = 32;
constexpr int kMaxLaneM = 12;
constexpr int kCodesPerWord = 8;
struct LanesArgs {
  const void *codebook;   // 16 numbers of the kernels' dtype
  const uint32_t *codes;  // [elements / 8][kLaneBlockN], made by transpose_codes()
  const float *scales;    // [elements / per_scale][kLaneBlockN]
  int64_t per_scale;
  const void *x;  // [elements / 8][m][8], each 8 made by pair_for_lanes()
  int64_t elements;
  int n;  // a multiple of a vector of sums
  int m;
  float *sums;  // [m][sums_stride]
  int64_t sums_stride;
  // Packed codes of the next rows or columns, as many per row as here; or NULL.
  const uint8_t *next;
  int64_t row_bytes;
  // The term that is added to each entry, like the scales, and the sums of x, [m][x_sums_stride];
  // or NULL.
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

// Dense rows of the weight, added up with factors: the sums belong to rows of x and columns of the
// weight.
constexpr int kOuterColumns = 128;
constexpr int kOuterM = 6;
struct OuterArgs {
  const void *w;     // rows, or in bf16 pairs of rows whose elements alternate
  int64_t w_stride;  // from one row or pair to the next, in elements
  const void *x;     // [m][rows]
  int64_t x_stride;
  int rows;     // in bf16 an even number
  int columns;  // a multiple of kOuterColumns; in fp32 also fewer, a multiple of a vector
  int m;
  float *sums;  // [m][sums_stride]
  int64_t sums_stride;
};

// Rows of codes as numbers, (entry + zero) * scale, in the order of prepared x.
struct DecodeArgs {
  const void *codebook;
  const uint8_t *packed;
  int64_t row_bytes;
  const float *scales;
  const float *zeros;  // or NULL
  int64_t scale_stride;
  int scales_per_unit;  // 1 or 2
  int64_t elements;     // a multiple of the unit
  int64_t n;
  float *out;
  int64_t out_stride;
};

// The kernels of dot for one kind of weight. Arrays are indexed by the dtype of x, as in
// MatmulKernels.
struct DotKernels {
  int codebook_dtype;
  // Brings whole units of x into the order in which dot meets the codes.
  void (*prepare[3])(const void *x, int64_t elements, void *out);
  void (*dot)(const DotArgs &args);
  void (*dot_zeros)(const DotArgs &args);            // NULL if the kind has no zeros
  void (*decode)(const DecodeArgs &args) = nullptr;  // NULL if this set has no transpose_x
  // Splits whole units of x in bf16 for dot_split, and adds them to `out`, with numbers from
  // `first` on and with scales that are multiplied by `unit`. Computes x_sums, too. Returns false
  // if two integers cannot hold a number. NULL if this set has no dot_split.
  bool (*split_x)(const void *x, int64_t elements, float unit, int64_t first, SplitX &out,
                  float *x_sums) = nullptr;
  // dot for one row of x, where DotArgs::x is a SplitX and DotArgs::codebook are the entries of a
  // SplitCodebook. `elements` is not used.
  void (*dot_split)(const DotArgs &args) = nullptr;
  void (*dot_split_zeros)(const DotArgs &args) = nullptr;
  // Splits a unit of x in bf16, and returns the number of rests; -1 if fp32 does not hold one.
  int (*split_pairs)(const SplitPairsArgs &args) = nullptr;
  void (*decode_pairs)(const DecodePairsArgs &args) = nullptr;
  void (*decode_gptq_pairs)(const DecodeWordPairsArgs &args) = nullptr;
  void (*decode_awq_pairs)(const DecodeWordPairsArgs &args) = nullptr;
  // NULL if this set has no products of pairs.
  void (*multiply_pairs)(const PairsArgs &args) = nullptr;
};

// The rows of x that transpose_x takes.
constexpr int kTransposedM = 8;

// The kernels that form products in one dtype. Arrays are indexed by the dtype of x, in the order
// of nf4.h; an entry is NULL if this set does not serve that dtype.
struct MatmulKernels {
  int dtype;   // NF4_DTYPE_FP32 or NF4_DTYPE_BF16
  int unit;    // in elements: 64 or 128
  int tile_m;  // the best number of rows of x to process together: at most 6
  // The best part of a row to process together: 4096 bytes of fp32, 8192 of bf16.
  int tile_elements;
  int max_dot_m;            // the largest m for which dot is the fastest way
  int max_columns_m;        // the largest m for which columns are
  int sum_lanes;            // the floats that x_sums() makes of a unit
  int column_lanes;         // the rows of the weight that columns process together
  DotKernels codebook_dot;  // the first of two codes is the high nibble
  DotKernels int4_dot;      // the first of two codes is the low nibble
  // The sums of whole units of prepared x, a vector for each unit.
  void (*x_sums)(const void *x, int64_t elements, float *sums);
  // pair_columns brings whole steps of x, in this set's dtype, into the order of gptq_columns; it
  // may be NULL. column_sums sums `count` parts of `cols` columns, which are `stride` elements
  // apart.
  void (*pair_columns)(const void *x, int64_t elements, void *out);
  void (*column_sums)(const void *x, int64_t stride, int64_t cols, int64_t count, float *sums);
  void (*gptq_columns)(const ColumnsArgs &args);
  void (*awq_columns)(const ColumnsArgs &args);    // NULL if blocks are better
  void (*block_columns)(const ColumnsArgs &args);  // words in GPTQ's order
  void (*scattered_columns)(const ScatteredArgs &args);
  // Converts whole steps of x; NULL if x has this set's dtype.
  void (*convert[3])(const void *x, int64_t elements, void *out);
  void (*tile)(const TileArgs &args);
  void (*outer)(const OuterArgs &args);
  // Interleaves whole steps of two rows, element by element; NULL if rows are used singly.
  void (*pair_rows)(const void *a, const void *b, int64_t elements, void *out);
  // Transposes kTransposedM rows of `elements` floats; NULL if this set has no products with
  // transposed x.
  void (*transpose_x)(const float *x, int64_t x_stride, int64_t elements, float *out,
                      int64_t out_stride) = nullptr;
  // The functions of lanes, which serves more rows of x than dot; NULL if this set does not have
  // it. transpose_codes puts a word of each of 16 rows into a lane; missing rows become zeros.
  // transpose_scales does the same for scales. Both work in whole multiples of 16 words or scales.
  // pair_for_lanes brings whole steps of x into the order in which the kernel meets the codes,
  // where the first code is the high nibble, or the low one: 8 columns, and the next 8 `stride`
  // elements from there.
  void (*transpose_codes)(const uint8_t *packed, int64_t row_bytes, int rows, int64_t words,
                          uint32_t *out) = nullptr;
  void (*transpose_scales)(const float *scales, int64_t stride, int64_t count,
                           float *out) = nullptr;
  void (*pair_for_lanes)(const void *x, int64_t elements, bool high_first, void *out,
                         int64_t stride) = nullptr;
  // Computes the scales of a nested block or of a part of it.
  void (*nested_scales)(const uint8_t *codes, int64_t count, const float *table, float absmax,
                        float offset, float *out) = nullptr;
  void (*lanes)(const LanesArgs &args) = nullptr;
};

extern const MatmulKernels kAvx2Matmul;
extern const MatmulKernels kAvx2MatmulOfBf16;  // in fp32, for x in bf16
extern const MatmulKernels kAvx512Matmul;
extern const MatmulKernels kAvx512Bf16Matmul;
extern const MatmulKernels kNeonMatmul;
extern const MatmulKernels kNeonMatmulOfBf16;  // in fp32, for x in bf16
extern const MatmulKernels kNeonBf16Matmul;

}  // namespace nf4::cpu
