// Matmul by AVX2 in fp32 (with FMA and F16C).
//
// Dot. 8 weights take 2 shifts, two look-ups and a blend (vpermps: 8 floats are one register), and
// with each row of x an fma. Tile: 12 fma, two a cycle, for 7 loads; it has 16 registers.
#include "cpu/isa/avx2.hpp"

#include "cpu/matmul/columns.hpp"
#include "cpu/matmul/loops.hpp"
#include "nf4/nf4.h"

namespace nf4::cpu {
namespace {

struct Floats {
  using Item = float;
  using Operand = __m256;
  using Sum = __m256;
  using Codes = __m256i;
  static constexpr int kLanes = 8;
  static constexpr int kSumLanes = kLanes;
  static constexpr int kVectors = 8;
  static constexpr int kUnit = kLanes * kVectors;
  static constexpr int kDotN[] = {1, 1, 1, 1};
  static constexpr int kTileM = 3;
  static constexpr int kColumnVectors[] = {4, 2, 2, 1};
  static constexpr int kColumnSums = 8;

  static __m256 zero() { return _mm256_setzero_ps(); }
  static __m256 load(const float *x) { return _mm256_loadu_ps(x); }
  static __m256 one() { return _mm256_set1_ps(1); }
  static __m256 load_sums(const float *sums) { return _mm256_loadu_ps(sums); }
  static void store_sums(float *to, __m256 sums) { _mm256_storeu_ps(to, sums); }
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

  static Floats16 load_table(const void *codebook) {
    return Floats16::load(static_cast<const float *>(codebook));
  }
  static __m256i load_codes(const uint8_t *packed) {
    return _mm256_loadu_si256((const __m256i *)packed);
  }
  static __m256 look_up(const Floats16 &table, __m256i codes) { return table.look_up(codes); }
  static __m256i next(__m256i codes) { return _mm256_srli_epi32(codes, 4); }

  // Which of the unit's scales each lane takes.
  static __m256i load_spread(int scales) {
    return scales == 1 ? _mm256_setzero_si256() : _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
  }
  static __m256 spread_scales(const float *scales, __m256i spread) {
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(scales), spread);
  }

  static void split_even_odd(__m256 a, __m256 b, __m256 &even, __m256 &odd) {
    const auto in_order = [](__m256 x) {
      return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8));
    };
    even = in_order(_mm256_shuffle_ps(a, b, 0x88));
    odd = in_order(_mm256_shuffle_ps(a, b, 0xdd));
  }

  // Of words of GPTQ and AWQ. The first `lanes` of them, and zeros.
  static __m256i load_words(const uint32_t *words, int64_t lanes) {
    if (lanes >= kLanes) return _mm256_loadu_si256((const __m256i *)words);
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(lanes)),
                                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return _mm256_maskload_epi32((const int *)words, mask);
  }
  static __m256i shift_words(__m256i words, int bits) { return _mm256_srli_epi32(words, bits); }
  static __m256i half_words(const __m256i (&words)[1], int half) {
    return half == 0 ? words[0] : _mm256_srli_epi32(words[0], 16);
  }
  static __m256 broadcast(const float *x) { return _mm256_broadcast_ss(x); }
  static __m256 broadcast_sum(float x) { return _mm256_set1_ps(x); }
  // 8 less the zero point, whose stored form the low bits are.
  static __m256 zero_terms(__m256i words, int offset) {
    const __m256i stored = _mm256_add_epi32(words, _mm256_set1_epi32(offset));
    const __m256i zeros = _mm256_and_si256(stored, _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_set1_epi32(8), zeros));
  }
  // The zeros of the rows of a word to the low bits of a lane each.
  static __m256i spread_zeros(const uint32_t *words, int64_t) {
    return _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(*words)),
                             _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
  }
  static __m256 load_scales(const uint16_t *scales, bool fp16, int64_t rows) {
    if (rows >= kLanes) return widen(_mm_loadu_si128((const __m128i *)scales), fp16);
    uint16_t padded[kLanes] = {};
    for (int i = 0; i < rows; ++i) padded[i] = scales[i];
    return widen(_mm_loadu_si128((const __m128i *)padded), fp16);
  }
  // Those of the rows of so many words, by nibble: of even rows, then of odd ones.
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
};

}  // namespace

const MatmulKernels kAvx2Matmul = {
    NF4_DTYPE_FP32,
    Floats::kUnit,
    Floats::kTileM,
    1024,
    4,
    Floats::kSumLanes,
    {prepare_units<Floats, Fp32>, prepare_units<Floats, Fp16>, prepare_units<Floats, Bf16>},
    {prepare_units<Floats, Fp32, false>, prepare_units<Floats, Fp16, false>,
     prepare_units<Floats, Bf16, false>},
    dot<Floats>,
    dot<Floats, true>,
    x_sums<Floats>,
    gptq_columns<Floats>,
    awq_columns<Floats>,
    {nullptr, convert<Floats, Fp16>, convert<Floats, Bf16>},
    tile<Floats>,
};

}  // namespace nf4::cpu
