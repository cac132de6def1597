// What the AVX2 files share (F16C included). In an unnamed namespace, as each file is compiled for
// instructions that not every machine has: nothing of it may be linked elsewhere.
#pragma once

#include <immintrin.h>

namespace nf4::cpu {
namespace {

// Element types: 8 of them as floats.
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

// 16 floats by code.
struct Floats16 {
  __m256 low, high;

  static Floats16 load(const float *codebook) {
    return {_mm256_loadu_ps(codebook), _mm256_loadu_ps(codebook + 8)};
  }

  // By the low 4 bits of each index.
  __m256 look_up(__m256i codes) const {
    // vpermps reads three bits of a code; the fourth, as the sign, chooses the half.
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, codes),
                            _mm256_permutevar8x32_ps(high, codes), upper);
  }
};

}  // namespace
}  // namespace nf4::cpu
