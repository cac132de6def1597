// Helpers that the AVX-512 files share. They are in an unnamed namespace: each file is compiled for
// instructions that not every machine has, so nothing of it may be linked elsewhere.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/isa/unroll.hpp"

namespace nf4::cpu {
namespace {

inline __m512i iota() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

inline __m512 as_floats(__m512i x) { return _mm512_castsi512_ps(x); }
inline __m512i as_integers(__m512 x) { return _mm512_castps_si512(x); }

// Transposes 4 x 4 words within each 128-bit lane: words j of x[i] to x[i + 3] go to b[i + j].
// Inlined, so that they stay in registers.
template <class Vector, int kVectors>
__attribute__((always_inline)) inline void transpose_lanes(const Vector (&x)[kVectors],
                                                           __m512i (&b)[kVectors]) {
  NF4_UNROLL
  for (int i = 0; i < kVectors; i += 4) {
    const __m512i low = _mm512_unpacklo_epi32((__m512i)x[i], (__m512i)x[i + 1]);
    const __m512i high = _mm512_unpackhi_epi32((__m512i)x[i], (__m512i)x[i + 1]);
    const __m512i next_low = _mm512_unpacklo_epi32((__m512i)x[i + 2], (__m512i)x[i + 3]);
    const __m512i next_high = _mm512_unpackhi_epi32((__m512i)x[i + 2], (__m512i)x[i + 3]);
    b[i] = _mm512_unpacklo_epi64(low, next_low);
    b[i + 1] = _mm512_unpackhi_epi64(low, next_low);
    b[i + 2] = _mm512_unpacklo_epi64(high, next_high);
    b[i + 3] = _mm512_unpackhi_epi64(high, next_high);
  }
}

// Transposes 16 x 16 words.
template <class Vector>
__attribute__((always_inline)) inline void transpose(Vector (&x)[16]) {
  __m512i b[16];
  transpose_lanes(x, b);
  // b[4 r + j] has words j, j + 4, j + 8 and j + 12 of rows 4 r to 4 r + 3, one word per lane.
  NF4_UNROLL
  for (int j = 0; j < 4; ++j) {
    const __m512i low = _mm512_shuffle_i32x4(b[j], b[j + 4], 0x88);
    const __m512i high = _mm512_shuffle_i32x4(b[j + 8], b[j + 12], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(b[j], b[j + 4], 0xdd);
    const __m512i odd_high = _mm512_shuffle_i32x4(b[j + 8], b[j + 12], 0xdd);
    x[j] = (Vector)_mm512_shuffle_i32x4(low, high, 0x88);
    x[j + 8] = (Vector)_mm512_shuffle_i32x4(low, high, 0xdd);
    x[j + 4] = (Vector)_mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    x[j + 12] = (Vector)_mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
}

// Element types, in vectors of 16 floats.
struct Fp32 {
  static constexpr int kBytes = 4;
  static __m512 load(const char *x) { return _mm512_loadu_ps(x); }
};

struct Fp16 {
  static constexpr int kBytes = 2;
  static constexpr int kInfinity = 0x7c00;
  static __m512 widen(__m256i x) { return _mm512_cvtph_ps(x); }
  static __m512 load(const char *x) { return widen(_mm256_loadu_si256((const __m256i *)x)); }
};

struct Bf16 {
  static constexpr int kBytes = 2;
  static constexpr int kInfinity = 0x7f80;
  static __m512 widen(__m256i x) {
    return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  static __m512 load(const char *x) { return widen(_mm256_loadu_si256((const __m256i *)x)); }
};

// For matmul: sums in fp32, and the scales of a unit.
struct Fp32Sums {
  using Sum = __m512;
  static constexpr int kSumLanes = 16;

  static __m512 zero() { return _mm512_setzero_ps(); }
  static __m512 load_sums(const float *sums) { return _mm512_loadu_ps(sums); }
  static void store_sums(float *to, __m512 sums) { _mm512_storeu_ps(to, sums); }
  static __m512 scale_add(__m512 a, __m512 b, __m512 sum) { return _mm512_fmadd_ps(a, b, sum); }
  static float sum_of(__m512 x) { return _mm512_reduce_add_ps(x); }
  // Reduces four vectors to four floats.
  static void add_sums(__m512 a, __m512 b, __m512 c, __m512 d, float *to) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 by_lane =
        _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half =
        _mm256_add_ps(_mm512_castps512_ps256(by_lane), _mm512_extractf32x8_ps(by_lane, 1));
    const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), sums));
  }

  // These are for words of GPTQ and AWQ. Loads the first `lanes` words; the other lanes are zero.
  static __m512i load_words(const uint32_t *words, int64_t lanes) {
    return _mm512_maskz_loadu_epi32(mask_of(lanes), words);
  }
  static __m512i shift_words(__m512i words, unsigned bits) {
    return _mm512_srli_epi32(words, bits);
  }
  static __m512 broadcast_sum(float x) { return _mm512_set1_ps(x); }
  // Returns 8 minus the zero point in the low bits.
  static __m512 zero_terms(__m512i words) {
    return _mm512_permutexvar_ps(
        words, _mm512_setr_ps(8, 7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7));
  }
  // Moves the zeros of `rows` rows, in whole words of GPTQ or AWQ that are stored less `offset`, to
  // the low bits of one lane each.
  static __m512i spread_zeros(const uint32_t *words, int64_t rows, uint32_t offset, bool awq) {
    const __m512i both = _mm512_add_epi32(load_words(words, rows > 8 ? 2 : 1),
                                          _mm512_set1_epi32(static_cast<int>(offset)));
    const __m512i by_row = _mm512_permutexvar_epi32(_mm512_srli_epi32(iota(), 3), both);
    const __m512i shifts =
        awq ? _mm512_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28, 0, 16, 4, 20, 8, 24, 12, 28)
            : _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    return _mm512_srlv_epi32(by_row, shifts);
  }
  // Turns a NaN into the one whose mantissa has only the highest bit set.
  static __m512 canonical(__m512 x) {
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_mov_ps(x, nan, as_floats(_mm512_set1_epi32(0x7fc00000)));
  }
  static __m512 load_scales(const uint16_t *scales, bool fp16, int64_t rows) {
    return widen(_mm256_maskz_loadu_epi16(mask_of(rows), scales), fp16);
  }
  // Loads the scales of the rows of `words` words, by nibble: the even rows, then the odd ones.
  static void load_awq_scales(const uint16_t *scales, bool fp16, int64_t words,
                              __m512 (&out)[2][4]) {
    __m512 pairs[4], even[2], odd[2];
    for (int i = 0; i < 4; ++i)
      pairs[i] = as_floats(load_words((const uint32_t *)scales + 16 * i, 4 * words - 16 * i));
    split_words(pairs[0], pairs[1], even[0], odd[0]);
    split_words(pairs[2], pairs[3], even[1], odd[1]);
    split_words(even[0], even[1], pairs[0], pairs[2]);
    split_words(odd[0], odd[1], pairs[1], pairs[3]);
    for (int i = 0; i < 4; ++i) {
      const __m512i words_of_two = as_integers(pairs[i]);
      out[0][i] = widen(_mm512_cvtepi32_epi16(words_of_two), fp16);
      out[1][i] = widen(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words_of_two, 16)), fp16);
    }
  }
  static void split_words(__m512 a, __m512 b, __m512 &even, __m512 &odd) {
    const __m512i first = _mm512_add_epi32(iota(), iota());
    even = _mm512_permutex2var_ps(a, first, b);
    odd = _mm512_permutex2var_ps(a, _mm512_add_epi32(first, _mm512_set1_epi32(1)), b);
  }
  static __m512 widen(__m256i x, bool fp16) { return fp16 ? Fp16::widen(x) : Bf16::widen(x); }
  static __mmask16 mask_of(int64_t lanes) {
    return static_cast<__mmask16>(lanes >= 16 ? 0xffff : lanes <= 0 ? 0 : (1 << lanes) - 1);
  }

  // Returns the index of the scale that each lane of a unit uses.
  static __m512i load_spread(int scales) {
    const __m512i quarter = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_srlv_epi32(quarter, _mm512_set1_epi32(2 - scales / 2));
  }
  static __m512 spread_scales(const float *scales, __m512i spread) {
    return _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(_mm_loadu_ps(scales)));
  }
};

}  // namespace
}  // namespace nf4::cpu
