// What the AVX-512 files share. In an unnamed namespace, as each file is compiled for instructions
// that not every machine has: nothing of it may be linked elsewhere.
#pragma once

#include <immintrin.h>

namespace nf4::cpu {
namespace {

inline __m512i iota() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

inline __m512 as_floats(__m512i x) { return _mm512_castsi512_ps(x); }
inline __m512i as_integers(__m512 x) { return _mm512_castps_si512(x); }

// Element types: 16 of them as floats.
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

// Of matmul: sums in fp32, and the scales of a unit.
struct Fp32Sums {
  using Sum = __m512;
  static constexpr int kSumLanes = 16;

  static __m512 zero() { return _mm512_setzero_ps(); }
  static __m512 load_sums(const float *sums) { return _mm512_loadu_ps(sums); }
  static void store_sums(float *to, __m512 sums) { _mm512_storeu_ps(to, sums); }
  static __m512 scale_add(__m512 a, __m512 b, __m512 sum) { return _mm512_fmadd_ps(a, b, sum); }
  static float sum_of(__m512 x) { return _mm512_reduce_add_ps(x); }
  // The sums of four vectors to four floats.
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

  // Which of the unit's scales each lane takes.
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
