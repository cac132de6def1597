// Products for several rows of x in bf16, in integers, with AVX2: a lane is a row of the weight,
// and x is broadcast. vpmaddwd multiplies pairs of columns: 64 weights take 4 vpmaddwd and 4
// additions, on three ports, for each row of x, in place of 8 fma on two. Before, 64 weights are
// decoded by 20 instructions.
#pragma once

#include <immintrin.h>

#include "cpu/isa/avx2.hpp"
#include "cpu/matmul/kernels.hpp"
#include "cpu/matmul/pair_split_loops.hpp"

namespace nf4::cpu {
namespace {

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

// Decodes a vector of words, whose halves are pairs, to four vectors, `step` apart.
inline void decode_halves(__m256i words, __m256i zero, int16_t *out, int64_t step) {
  const __m256i nibbles = _mm256_set1_epi32(0x000f000f);
  NF4_UNROLL
  for (int i = 0; i < 4; ++i, words = _mm256_srli_epi32(words, 4))
    _mm256_store_si256((__m256i *)(out + i * step),
                       _mm256_add_epi16(_mm256_and_si256(words, nibbles), zero));
}

constexpr int64_t kPairBytesAhead = 512;

// A vector has a word of each of 8 rows.
inline void decode_gptq_pairs(const DecodeWordPairsArgs &args) {
  constexpr int64_t kPair = 2 * kPairLanes;
  const int64_t tile = args.units * kUnitPairs * kPair, scales = args.units * args.scales_per_unit;
  for (int64_t n = 0; n < args.rows; n += 8) {
    const uint32_t *words = args.words + n;
    int16_t *out = args.out + n / kPairLanes * tile + n % kPairLanes * 2;
    const float *zeros = args.zeros + n / kPairLanes * scales * kPairLanes + n % kPairLanes;
    for (int64_t k = 0; k < args.cols; k += kPairUnit / args.scales_per_unit, zeros += kPairLanes) {
      const __m256i zero = pairs_of(zeros);
      const int64_t end = k + kPairUnit / args.scales_per_unit;
      for (int64_t i = k; i < end && i < args.cols;
           i += 8, words += args.stride, out += 4 * kPair) {
        __builtin_prefetch((const char *)words + kPairBytesAhead, 0, 3);
        decode_halves(Int4Lanes::load_words(words, args.rows - n), zero, out, kPair);
      }
    }
  }
}

// A vector has a word of 8 rows for each of 64 rows; words of two columns make pairs. The rows of a
// nibble are in one vector.
inline void decode_awq_pairs(const DecodeWordPairsArgs &args) {
  constexpr int64_t kPair = 2 * kPairLanes, kHalf = kPair / 2;
  const int64_t tile = args.units * kUnitPairs * kPair, scales = args.units * args.scales_per_unit;
  const uint32_t *words = args.words;
  int16_t *out = args.out;
  for (int64_t scale = 0; scale < scales; ++scale) {
    __m256i zeros[8];
    for (int i = 0; i < 8; ++i)
      zeros[i] = pairs_of(args.zeros + (i / 2 * scales + scale) * kPairLanes + i % 2 * 8);
    const int64_t first = scale * kPairUnit / args.scales_per_unit;
    const int64_t end = first + kPairUnit / args.scales_per_unit;
    for (int64_t k = first; k < end && k < args.cols;
         k += 2, words += 2 * args.stride, out += kPair) {
      __builtin_prefetch((const char *)words + kPairBytesAhead / 2, 0, 3);
      __builtin_prefetch((const char *)(words + args.stride) + kPairBytesAhead / 2, 0, 3);
      const __m256i a = Int4Lanes::load_words(words, args.rows / 8);
      const __m256i b = Int4Lanes::load_words(words + args.stride, args.rows / 8);
      const __m256i low = _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
      const __m256i high = _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xaa);
      const __m256i nibbles = _mm256_set1_epi32(0x000f000f);
      NF4_UNROLL
      for (int i = 0; i < 8; ++i) {
        const __m256i codes =
            _mm256_and_si256(_mm256_srli_epi32(i < 4 ? low : high, i % 4 * 4), nibbles);
        _mm256_store_si256((__m256i *)(out + i / 2 * tile + i % 2 * kHalf),
                           _mm256_add_epi16(codes, zeros[i]));
      }
    }
  }
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
    if (m == 0 && args.next != nullptr) prefetch_next(args, unit);
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
