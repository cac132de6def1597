// Helpers that the AVX2 files share (F16C included). They are in an unnamed namespace: each file is
// compiled for instructions that not every machine has, so nothing of it may be linked elsewhere.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/isa/unroll.hpp"

namespace nf4::cpu {
namespace {

// Element types, in vectors of 8 floats.
struct Fp32 {
  static constexpr int kBytes = 4;
  static __m256 load(const char *x) { return _mm256_loadu_ps((const float *)x); }
};

struct Fp16 {
  static constexpr int kBytes = 2;
  static constexpr int kInfinity = 0x7c00;
  static __m256 widen(__m128i x) { return _mm256_cvtph_ps(x); }
  static __m256 load(const char *x) { return widen(_mm_loadu_si128((const __m128i *)x)); }
};

struct Bf16 {
  static constexpr int kBytes = 2;
  static constexpr int kInfinity = 0x7f80;
  static __m256 widen(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }
  static __m256 load(const char *x) { return widen(_mm_loadu_si128((const __m128i *)x)); }
};

// 16 floats, indexed by code.
struct Floats16 {
  __m256 low, high;

  static Floats16 load(const float *codebook) {
    return {_mm256_loadu_ps(codebook), _mm256_loadu_ps(codebook + 8)};
  }

  // Looks up the low 4 bits of each index.
  __m256 look_up(__m256i codes) const {
    // vpermps reads three bits of a code; the fourth, as the sign, chooses the half.
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, codes),
                            _mm256_permutevar8x32_ps(high, codes), upper);
  }
};

// Transposes 8 x 8 words. Inlined, so that they stay in registers.
template <class Vector>
__attribute__((always_inline)) inline void transpose(Vector (&x)[8]) {
  __m256i a[8], b[8];
  NF4_UNROLL
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_epi32((__m256i)x[i], (__m256i)x[i + 1]);
    a[i + 1] = _mm256_unpackhi_epi32((__m256i)x[i], (__m256i)x[i + 1]);
  }
  NF4_UNROLL
  for (int i = 0; i < 8; i += 4) {
    NF4_UNROLL
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = _mm256_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm256_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
  }
  NF4_UNROLL
  for (int j = 0; j < 4; ++j) {
    x[j] = (Vector)_mm256_permute2x128_si256(b[j], b[j + 4], 0x20);
    x[j + 4] = (Vector)_mm256_permute2x128_si256(b[j], b[j + 4], 0x31);
  }
}

// Integer weights: words, zeros and scales, one per lane.
struct Int4Lanes {
  using Sum = __m256;
  using Codes = __m256i;
  static constexpr int kSumLanes = 8;

  static __m256 zero() { return _mm256_setzero_ps(); }
  static __m256 load_sums(const float *sums) { return _mm256_loadu_ps(sums); }
  static void store_sums(float *to, __m256 sums) { _mm256_storeu_ps(to, sums); }

  // These are for words of GPTQ and AWQ. Loads the first `lanes` words; the other lanes are zero.
  static __m256i load_words(const uint32_t *words, int64_t lanes) {
    if (lanes >= kSumLanes) return _mm256_loadu_si256((const __m256i *)words);
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(lanes)),
                                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return _mm256_maskload_epi32((const int *)words, mask);
  }
  static __m256i shift_words(__m256i words, int bits) { return _mm256_srli_epi32(words, bits); }
  static __m256 broadcast_sum(float x) { return _mm256_set1_ps(x); }
  // Returns 8 minus the zero point in the low bits.
  static __m256 zero_terms(__m256i words) {
    const __m256i zeros = _mm256_and_si256(words, _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_set1_epi32(8), zeros));
  }
  // Moves the zeros of the rows of a GPTQ or AWQ word, which is stored less `offset`, to the low
  // bits of one lane each.
  static __m256i spread_zeros(const uint32_t *words, int64_t, uint32_t offset, bool awq) {
    const __m256i shifts = awq ? _mm256_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28)
                               : _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    return _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(*words + offset)), shifts);
  }
  // Turns a NaN into the one whose mantissa has only the highest bit set.
  static __m256 canonical(__m256 x) {
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }
  static __m256 load_scales(const uint16_t *scales, bool fp16, int64_t rows) {
    if (rows >= kSumLanes) return widen(_mm_loadu_si128((const __m128i *)scales), fp16);
    uint16_t padded[kSumLanes] = {};
    for (int i = 0; i < rows; ++i) padded[i] = scales[i];
    return widen(_mm_loadu_si128((const __m128i *)padded), fp16);
  }
  // Loads the scales of the rows of `words` words, by nibble: the even rows, then the odd ones.
  static void load_awq_scales(const uint16_t *scales, bool fp16, int64_t words,
                              __m256 (&out)[2][4]) {
    __m256 pairs[4], even[2], odd[2];
    for (int i = 0; i < 4; ++i)
      pairs[i] =
          _mm256_castsi256_ps(load_words((const uint32_t *)scales + 8 * i, 4 * words - 8 * i));
    split_even_odd(pairs[0], pairs[1], even[0], odd[0]);
    split_even_odd(pairs[2], pairs[3], even[1], odd[1]);
    split_even_odd(even[0], even[1], pairs[0], pairs[2]);
    split_even_odd(odd[0], odd[1], pairs[1], pairs[3]);
    for (int i = 0; i < 4; ++i) {
      const __m256i words_of_two = _mm256_castps_si256(pairs[i]);
      out[0][i] = widen(low_halves(words_of_two), fp16);
      out[1][i] = widen(low_halves(_mm256_srli_epi32(words_of_two, 16)), fp16);
    }
  }
  static __m128i low_halves(__m256i words) {
    const __m256i low = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
    const __m256i by_lane = _mm256_packus_epi32(low, low);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(by_lane, 0xd8));
  }
  static __m256 widen(__m128i x, bool fp16) { return fp16 ? Fp16::widen(x) : Bf16::widen(x); }
  static void split_even_odd(__m256 a, __m256 b, __m256 &even, __m256 &odd) {
    const auto in_order = [](__m256 x) {
      return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8));
    };
    even = in_order(_mm256_shuffle_ps(a, b, 0x88));
    odd = in_order(_mm256_shuffle_ps(a, b, 0xdd));
  }
};

}  // namespace
}  // namespace nf4::cpu
