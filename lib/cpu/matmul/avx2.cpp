// Matmul with AVX2 in fp32 (with FMA and F16C).
//
// Dot: 8 weights take 2 shifts, two look-ups and a blend (vpermps: 8 floats are one register), plus
// an fma for each row of x. Tile: 12 fma, two a cycle, for 7 loads; it has 16 registers.
#include "cpu/isa/avx2.hpp"

#include "cpu/matmul/column_loops.hpp"
#include "cpu/matmul/loops.hpp"
#include "cpu/matmul/outer_loops.hpp"
#include "cpu/matmul/scattered_loops.hpp"
#include "nf4/nf4.h"

namespace nf4::cpu {
namespace {

struct Floats : Int4Lanes {
  using Item = float;
  using Operand = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kVectors = 8;
  static constexpr int kUnit = kLanes * kVectors;
  static constexpr int kDotN[] = {1, 1, 1, 1};
  static constexpr int kTileM = 3;
  static constexpr int kOuterVectors[] = {8, 4, 4, 2, 2, 2};
  static constexpr int kColumnM = 4;
  static constexpr int kColumnRegisters = 12;

  static __m256 load(const float *x) { return _mm256_loadu_ps(x); }
  static __m256 one() { return _mm256_set1_ps(1); }
  static void store(float *to, __m256 x) { _mm256_storeu_ps(to, x); }
  static __m256 multiply(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
  static __m256 multiply_add(__m256 a, __m256 b, __m256 sum) { return _mm256_fmadd_ps(a, b, sum); }
  static __m256 scale_add(__m256 a, __m256 b, __m256 sum) { return _mm256_fmadd_ps(a, b, sum); }
  static float sum_of(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
  }
  // Reduces four vectors to four floats.
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

  // Returns the index of the scale that each lane of a unit uses.
  static __m256i load_spread(int scales) {
    return scales == 1 ? _mm256_setzero_si256() : _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
  }
  static __m256 spread_scales(const float *scales, __m256i spread) {
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(scales), spread);
  }

  static __m256 load_some(const float *x, int64_t) { return load(x); }
  static __m256 broadcast(const float *x) { return _mm256_broadcast_ss(x); }
  static __m256i half_words(const __m256i (&words)[1], int half) {
    return half == 0 ? words[0] : _mm256_srli_epi32(words[0], 16);
  }
};

}  // namespace

const MatmulKernels kAvx2Matmul = {
    NF4_DTYPE_FP32,
    Floats::kUnit,
    Floats::kTileM,
    1024,
    4,
    4,
    Floats::kSumLanes,
    Floats::kSumLanes,
    {prepare_units<Floats, Fp32>, prepare_units<Floats, Fp16>, prepare_units<Floats, Bf16>},
    {prepare_units<Floats, Fp32, false>, prepare_units<Floats, Fp16, false>,
     prepare_units<Floats, Bf16, false>},
    dot<Floats>,
    dot<Floats, true>,
    x_sums<Floats>,
    nullptr,
    column_sums<Floats>,
    gptq_columns<Floats>,
    awq_columns<Floats>,
    block_columns<Floats>,
    scattered_columns<Floats>,
    {nullptr, convert<Floats, Fp16>, convert<Floats, Bf16>},
    tile<Floats>,
    outer<Floats>,
    nullptr,
};

}  // namespace nf4::cpu
