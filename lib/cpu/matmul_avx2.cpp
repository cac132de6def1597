// AVX2 matmul in fp32 (with FMA and F16C), built as that of matmul_avx512.cpp.
//
// Dot. 8 weights take 2 shifts, two look-ups and a blend (vpermps: 8 floats are one register), and
// with each column an fma. Tile: 12 fma, two a cycle, for 7 loads; it has 16 registers.
#include <immintrin.h>

#include "cpu/matmul_kernels.hpp"
#include "nf4/nf4.h"

namespace nf4::cpu {
namespace {

struct Floats {
  using Item = float;
  using Operand = __m256;
  using Sum = __m256;
  using Codes = __m256i;
  struct Table {
    __m256 low, high;
  };
  static constexpr int kLanes = 8;
  static constexpr int kPieces = 8;
  static constexpr int kUnit = kLanes * kPieces;
  static constexpr int kDotRows[] = {1, 1, 1, 1};
  static constexpr int kTileColumns = 3;

  static __m256 zero() { return _mm256_setzero_ps(); }
  static __m256 load(const float *x) { return _mm256_loadu_ps(x); }
  static void store(float *to, __m256 x) { _mm256_storeu_ps(to, x); }
  static __m256 multiply(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
  static __m256 multiply_add(__m256 a, __m256 b, __m256 sum) { return _mm256_fmadd_ps(a, b, sum); }
  static __m256 scale_add(__m256 a, __m256 b, __m256 sum) { return _mm256_fmadd_ps(a, b, sum); }
  static float sum_of(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
  }
  // The sums of four vectors to four floats.
  static void add_sums(__m256 a, __m256 b, __m256 c, __m256 d, float *to) {
    const __m256 by_lane = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    const __m128 sums =
        _mm_add_ps(_mm256_castps256_ps128(by_lane), _mm256_extractf128_ps(by_lane, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), sums));
  }

  static Table load_table(const void *codebook) {
    const float *entries = static_cast<const float *>(codebook);
    return {_mm256_loadu_ps(entries), _mm256_loadu_ps(entries + 8)};
  }
  static __m256i load_codes(const uint8_t *packed) {
    return _mm256_loadu_si256((const __m256i *)packed);
  }
  static __m256 look_up(const Table &table, __m256i codes) {
    // vpermps reads three bits of a code; the fourth, as the sign, chooses the table.
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, codes),
                            _mm256_permutevar8x32_ps(table.high, codes), upper);
  }
  static __m256i next(__m256i codes) { return _mm256_srli_epi32(codes, 4); }

  // Which of the unit's scales each lane takes.
  static __m256i load_spread(int scales) {
    return scales == 1 ? _mm256_setzero_si256() : _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
  }
  static __m256 spread_scales(const float *scales, __m256i spread) {
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(scales), spread);
  }

  static void take_apart(__m256 a, __m256 b, __m256 &even, __m256 &odd) {
    const auto in_order = [](__m256 x) {
      return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8));
    };
    even = in_order(_mm256_shuffle_ps(a, b, 0x88));
    odd = in_order(_mm256_shuffle_ps(a, b, 0xdd));
  }
};

struct FromFp32 {
  static constexpr int kBytes = 4;
  static __m256 load(const char *x) { return _mm256_loadu_ps((const float *)x); }
};
struct FromFp16 {
  static constexpr int kBytes = 2;
  static __m256 load(const char *x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x)); }
};
struct FromBf16 {
  static constexpr int kBytes = 2;
  static __m256 load(const char *x) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16));
  }
};

}  // namespace

const MatmulKernels kAvx2Matmul = {
    NF4_DTYPE_FP32,
    Floats::kUnit,
    Floats::kTileColumns,
    1024,
    4,
    {prepare_units<Floats, FromFp32>, prepare_units<Floats, FromFp16>,
     prepare_units<Floats, FromBf16>},
    dot<Floats>,
    {nullptr, convert<Floats, FromFp16>, convert<Floats, FromBf16>},
    tile<Floats>,
};

}  // namespace nf4::cpu
