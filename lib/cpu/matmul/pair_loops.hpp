// Products for several rows of x in bf16, in integers, with AVX2: a lane is a row of the weight,
// and x is broadcast. vpmaddwd multiplies pairs of columns: 64 weights take 4 vpmaddwd and 4
// additions, on three ports, for each row of x, in place of 8 fma on two. Before, 64 weights are
// decoded by 20 instructions.
//
// 64 numbers of x share a power of two as their scale, with which the largest takes 15 bits. Each
// number of bf16 has 8 bits, so what is at least 1/128 of the largest is an integer. Others, 1 % of
// normal numbers, leave a rest, which is multiplied in fp32. Sums of products of integers are
// exact.
#pragma once

#include <immintrin.h>

#include "cpu/isa/avx2.hpp"
#include "cpu/matmul/kernels.hpp"

namespace nf4::cpu {
namespace {

// ---- Splitting x ---------------------------------------------------------------------

constexpr int kExponentBias = 127, kInfiniteExponent = 255;
// With a larger number, scales times the unit of a codebook are normal.
constexpr int kLeastExponent = 48;
constexpr int kPairBits = 15;  // of the largest number, without the sign
constexpr int kNumberBits = 8;

inline float power_of_two(int exponent) {
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((exponent + kExponentBias) << 23)));
}

inline float bf16_number(uint16_t x) {
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(x << 16)));
}

inline int biased_exponent(uint16_t x) { return x >> (kNumberBits - 1) & 0xff; }

// The biased exponent of the largest of 64 numbers.
inline int largest_exponent(const __m256i (&x)[4]) {
  const __m256i magnitude = _mm256_set1_epi16(0x7fff);
  __m256i largest = _mm256_and_si256(x[0], magnitude);
  NF4_UNROLL
  for (int i = 1; i < 4; ++i)
    largest = _mm256_max_epu16(largest, _mm256_and_si256(x[i], magnitude));
  const __m128i half =
      _mm_max_epu16(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  // vphminposuw finds the least one.
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)));
  return biased_exponent(static_cast<uint16_t>(~_mm_cvtsi128_si32(least)));
}

inline int sum_of_lanes(__m256i x) {
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

// The place of a column in the order of pairs.
inline int place_of(int column) { return column / 8 * 8 + column % 2 * 4 + column % 8 / 2; }

// Adds a rest times the unit of the codebook, and returns false if that is not exact.
inline bool add_rest(const SplitPairsArgs &args, int place, float x, int &count) {
  constexpr float kLeast = 0x1p-100f;
  const float product = x * args.unit;
  args.rests[count++] = {product, static_cast<int16_t>(args.first_place + place), args.m};
  return !(__builtin_fabsf(product) < kLeast);
}

// The integers of 64 numbers, in units of 2^exponent, in the order of pairs.
struct PairIntegers {
  __m256i in_order[4];
  __m256i sum;          // of magnitudes
  uint32_t inexact[2];  // a bit for each number: eight of the first 16, of the next 16, and so on

  PairIntegers(const __m256i (&x)[4], int exponent) {
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const __m256 inverse = _mm256_set1_ps(power_of_two(-exponent));
    const __m256i zero = _mm256_setzero_si256();
    __m256i differs[4];
    sum = zero;
    NF4_UNROLL
    for (int i = 0; i < 4; ++i) {
      // Numbers of fp32, in an order that packing restores.
      const __m256i wide[2] = {_mm256_unpacklo_epi16(zero, x[i]),
                               _mm256_unpackhi_epi16(zero, x[i])};
      __m256i integers[2], differ[2];
      NF4_UNROLL
      for (int j = 0; j < 2; ++j) {
        const __m256 scaled = _mm256_mul_ps(_mm256_castsi256_ps(wide[j]), inverse);
        integers[j] = _mm256_cvtps_epi32(scaled);
        differ[j] = _mm256_castps_si256(
            _mm256_cmp_ps(scaled, _mm256_cvtepi32_ps(integers[j]), _CMP_NEQ_UQ));
      }
      differs[i] = _mm256_packs_epi32(differ[0], differ[1]);
      const __m256i packed = _mm256_packs_epi32(integers[0], integers[1]);
      sum =
          _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_abs_epi16(packed), _mm256_set1_epi16(1)));
      in_order[i] = _mm256_shuffle_epi8(packed, order);
    }
    NF4_UNROLL
    for (int i = 0; i < 2; ++i)
      inexact[i] = static_cast<uint32_t>(
          _mm256_movemask_epi8(_mm256_packs_epi16(differs[2 * i], differs[2 * i + 1])));
  }

  int rests() const { return __builtin_popcount(inexact[0]) + __builtin_popcount(inexact[1]); }
};

// The largest exponent of the numbers that are worth being integers of kBits bits, when infinity,
// NaN or much larger numbers stand among them.
template <int kBits>
int most_frequent_exponent(const uint16_t *x) {
  int counts[kInfiniteExponent + 1] = {}, best = kLeastExponent, most = 0, in_window = 0;
  for (int i = 0; i < kPairUnit; ++i) ++counts[biased_exponent(x[i])];
  for (int e = 1; e < kInfiniteExponent; ++e) {
    in_window += counts[e];
    if (e > kBits - kNumberBits + 1) in_window -= counts[e - (kBits - kNumberBits + 1)];
    if (e < kLeastExponent || in_window <= most) continue;
    best = e;
    most = in_window;
  }
  return best;
}

// Splits numbers of very different magnitudes: what is not an integer is a rest as a whole.
inline int split_some(const SplitPairsArgs &args) {
  constexpr int kBits = kPairBits - 2;  // so that magnitudes do not exceed the sum allowed
  const int top = most_frequent_exponent<kBits>(args.x);
  const int exponent = top - kExponentBias - (kBits - 1);
  const float inverse = power_of_two(-exponent);
  int count = 0;
  bool fits = true;
  for (int i = 0; i < kPairUnit; ++i) {
    const float x = bf16_number(args.x[i]), scaled = x * inverse;
    const int e = biased_exponent(args.x[i]);
    const int integer = e <= top && e + kBits > top ? static_cast<int>(scaled) : 0;
    const bool exact = static_cast<float>(integer) == scaled;
    args.out[place_of(i)] = static_cast<int16_t>(exact ? integer : 0);
    if (!exact) fits &= add_rest(args, place_of(i), x, count);
  }
  *args.scale = power_of_two(exponent) * args.unit;
  return fits ? count : -1;
}

inline int split_pairs(const SplitPairsArgs &args) {
  constexpr int kManyRests = 8;
  __m256i x[4];
  NF4_UNROLL
  for (int i = 0; i < 4; ++i) x[i] = _mm256_loadu_si256((const __m256i *)args.x + i);
  const int largest = largest_exponent(x);
  int exponent =
      (largest < kLeastExponent ? kLeastExponent : largest) - kExponentBias - (kPairBits - 1);
  PairIntegers integers(x, exponent);
  while (sum_of_lanes(integers.sum) > args.most) integers = PairIntegers(x, ++exponent);
  if (largest == kInfiniteExponent || integers.rests() > kManyRests) return split_some(args);
  const float scale = power_of_two(exponent);
  *args.scale = scale * args.unit;
  NF4_UNROLL
  for (int i = 0; i < 4; ++i) _mm256_store_si256((__m256i *)args.out + i, integers.in_order[i]);
  int count = 0;
  bool fits = true;
  for (int i = 0; i < 2; ++i) {
    for (uint32_t left = integers.inexact[i]; left != 0; left &= left - 1) {
      const int bit = __builtin_ctz(left);
      const int column = i * 32 + bit / 8 % 2 * 16 + bit / 16 * 8 + bit % 8;
      const int place = place_of(column);
      fits &= add_rest(args, place, bf16_number(args.x[column]) - scale * args.out[place], count);
    }
  }
  return fits ? count : -1;
}

// ---- Decoding ------------------------------------------------------------------------

// The entries of the codes in one nibble of each byte, for two pairs of columns.
template <class T>
void look_up_nibbles(const typename T::Table &table, __m256i nibbles, __m256i (&out)[2]) {
  const __m256i low = _mm256_shuffle_epi8(table.low, nibbles);
  const __m256i high = _mm256_shuffle_epi8(table.high, nibbles);
  out[0] = _mm256_unpacklo_epi8(low, high);
  out[1] = _mm256_unpackhi_epi8(low, high);
}

// Decodes a word of 8 columns of each of 8 rows.
template <class T, bool kHighFirst, bool kZeros>
void decode_words(const typename T::Table &table, __m256i words, __m256i zero, int16_t *out) {
  // The lower two bytes of each word, then the upper two.
  const __m256i by_pairs = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  const __m256i nibble = _mm256_set1_epi8(15);
  const __m256i bytes = _mm256_shuffle_epi8(words, by_pairs);
  const __m256i nibbles[2] = {_mm256_and_si256(bytes, nibble),
                              _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble)};
  NF4_UNROLL
  for (int odd = 0; odd < 2; ++odd) {
    __m256i entries[2];
    look_up_nibbles<T>(table, nibbles[kHighFirst ? 1 - odd : odd], entries);
    NF4_UNROLL
    for (int i = 0; i < 2; ++i)
      _mm256_store_si256((__m256i *)(out + (2 * odd + i) * 2 * kPairLanes),
                         kZeros ? _mm256_add_epi16(entries[i], zero) : entries[i]);
  }
}

// Integers as pairs of equal ones.
inline __m256i pairs_of(const float *integers) {
  const __m256i wide = _mm256_cvtps_epi32(_mm256_loadu_ps(integers));
  return _mm256_or_si256(_mm256_slli_epi32(wide, 16),
                         _mm256_and_si256(wide, _mm256_set1_epi32(0xffff)));
}

template <class T, bool kHighFirst, bool kZeros>
void decode_pair_rows(const DecodePairsArgs &args) {
  constexpr int kRows = 8, kWords = 8;
  const auto table = T::load_table(args.entries);
  for (int first = 0; first < args.rows; first += kRows) {
    const uint8_t *rows[kRows];
    for (int i = 0; i < kRows; ++i)
      rows[i] = args.packed + (first + i < args.rows ? first + i : 0) * args.row_bytes;
    int16_t *out = args.out + 2 * first;
    const float *zeros = args.zeros + first;
    for (int unit = 0; unit < args.units; ++unit) {
      __m256i words[kRows];
      NF4_UNROLL
      for (int i = 0; i < kRows; ++i)
        words[i] = _mm256_loadu_si256((const __m256i *)(rows[i] + unit * (kPairUnit / 2)));
      transpose(words);
      NF4_UNROLL
      for (int j = 0; j < kWords; ++j, out += 4 * 2 * kPairLanes) {
        const int scale = unit * args.scales_per_unit + (args.scales_per_unit - 1) * j / 4;
        const __m256i zero = kZeros ? pairs_of(zeros + scale * kPairLanes) : words[j];
        decode_words<T, kHighFirst, kZeros>(table, words[j], zero, out);
      }
    }
  }
}

template <class T, bool kHighFirst>
void decode_pairs(const DecodePairsArgs &args) {
  if (args.zeros == nullptr) return decode_pair_rows<T, kHighFirst, false>(args);
  decode_pair_rows<T, kHighFirst, true>(args);
}

// ---- Products ------------------------------------------------------------------------

inline __m256i broadcast_pair(const int16_t *x) {
  int32_t pair;
  __builtin_memcpy(&pair, x, sizeof pair);
  return _mm256_set1_epi32(pair);
}

// Prefetches a part of the next codes for each unit, so that not all wait at once. Inlined, as GCC
// drops calls that only prefetch.
__attribute__((always_inline)) inline void prefetch_next(const PairsArgs &args, int unit) {
  constexpr int64_t kLine = 64;
  const int64_t bytes = args.units * kPairUnit / 2,
                rows = (kPairLanes + args.units - 1) / args.units;
  for (int64_t i = unit * rows; i < (unit + 1) * rows; ++i)
    for (int64_t at = 0; at < bytes; at += kLine)
      __builtin_prefetch(args.next + i * args.row_bytes + at, 0, 2);
}

// Multiplies all lanes with kM rows of x. A unit has kParts scales.
template <int kM, int kParts>
void pairs_block(const PairsArgs &args, int m) {
  constexpr int kVectors = kPairLanes / 8, kPairs = kUnitPairs / kParts;
  const int16_t *codes = args.codes;
  const float *scales = args.scales;
  float *const sums = args.sums + m * args.sums_stride;
  for (int unit = 0; unit < args.units; ++unit) {
    const int16_t *x = args.x + (unit * args.m + m) * kPairUnit;
    const float *const x_scales = args.x_scales + unit * args.m + m;
    if (m == 0) prefetch_next(args, unit);
    for (int part = 0; part < kParts; ++part, scales += kPairLanes) {
      __m256i totals[kM][kVectors];
      NF4_UNROLL
      for (int i = 0; i < kM; ++i) {
        NF4_UNROLL
        for (int v = 0; v < kVectors; ++v) totals[i][v] = _mm256_setzero_si256();
      }
      for (int pair = 0; pair < kPairs; ++pair, codes += 2 * kPairLanes, x += 2) {
        __m256i entries[kVectors];
        NF4_UNROLL
        for (int v = 0; v < kVectors; ++v)
          entries[v] = _mm256_load_si256((const __m256i *)codes + v);
        NF4_UNROLL
        for (int i = 0; i < kM; ++i) {
          const __m256i of_x = broadcast_pair(x + i * kPairUnit);
          NF4_UNROLL
          for (int v = 0; v < kVectors; ++v)
            totals[i][v] = _mm256_add_epi32(totals[i][v], _mm256_madd_epi16(entries[v], of_x));
        }
      }
      NF4_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const __m256 scale = _mm256_load_ps(scales + 8 * v);
        NF4_UNROLL
        for (int i = 0; i < kM; ++i) {
          float *const to = sums + i * args.sums_stride + 8 * v;
          const __m256 scaled =
              _mm256_mul_ps(_mm256_cvtepi32_ps(totals[i][v]), _mm256_broadcast_ss(x_scales + i));
          _mm256_store_ps(to, _mm256_fmadd_ps(scaled, scale, _mm256_load_ps(to)));
        }
      }
    }
  }
}

// Multiplies the rests of x.
inline void add_rests(const PairsArgs &args) {
  // Pairs of integers that select the first or the second column.
  const __m256i columns[2] = {_mm256_set1_epi32(1), _mm256_set1_epi32(1 << 16)};
  const int places_per_scale = kPairUnit / args.scales_per_unit;
  for (int i = 0; i < args.rest_count; ++i) {
    const PairRest &rest = args.rests[i];
    const unsigned place = rest.place - args.first_place;
    const float *const scales = args.scales + place / places_per_scale * kPairLanes;
    const int16_t *const codes = args.codes + place / 2 * 2 * kPairLanes;
    const __m256 x = _mm256_set1_ps(rest.x);
    float *const sums = args.sums + rest.m * args.sums_stride;
    NF4_UNROLL
    for (int v = 0; v < kPairLanes; v += 8) {
      const __m256i pairs = _mm256_load_si256((const __m256i *)(codes + 2 * v));
      const __m256 entries = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, columns[place % 2]));
      _mm256_store_ps(sums + v,
                      _mm256_fmadd_ps(_mm256_mul_ps(entries, x), _mm256_load_ps(scales + v),
                                      _mm256_load_ps(sums + v)));
    }
  }
}

template <int kM, int kParts>
void pairs_rows(const PairsArgs &args, int m) {
  for (; m + kM <= args.m; m += kM) pairs_block<kM, kParts>(args, m);
  if constexpr (kM > 1)
    if (m < args.m) pairs_rows<kM - 1, kParts>(args, m);
}

inline void multiply_pairs(const PairsArgs &args) {
  constexpr int kM = 4;  // with two vectors, as many sums as the registers hold beside the rest
  if (args.scales_per_unit > 1)
    pairs_rows<kM, 2>(args, 0);
  else
    pairs_rows<kM, 1>(args, 0);
  add_rests(args);
}

}  // namespace
}  // namespace nf4::cpu
