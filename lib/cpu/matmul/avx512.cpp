// Matmul with AVX-512 in fp32, which is exact to the last few bits for every x.
//
// Dot: 128 weights of a row take 7 shifts, 8 look-ups (vpermps: 16 floats are one register), and
// one more for the scales, plus 9 multiplications for each row of x. A Zen 4 executes at most two
// 512-bit instructions a cycle, which gives 1.7 ns for 64 weights and one row of x; measured in the
// caches, scales included: 2.5, 3.3, 4.8, 6.2 ns for 1 to 4 rows. These instructions bound it: two
// cores take 1.4 ms for 14336 x 4096, of which their memory needs at least half.
//
// Tile: 24 fma for 10 loads, one a cycle, with 16 weights each: twice the time of bf16.
#include "cpu/isa/avx512.hpp"

#include <climits>

#include "cpu/matmul/column_loops.hpp"
#include "cpu/matmul/loops.hpp"
#include "cpu/matmul/outer_loops.hpp"
#include "cpu/matmul/scattered_loops.hpp"
#include "nf4/nf4.h"

namespace nf4::cpu {
namespace {

struct Floats : Fp32Sums {
  using Item = float;
  using Operand = __m512;
  using Codes = __m512i;
  using Order = ByWords<Floats>;
  static constexpr int kLanes = 16;
  static constexpr int kVectors = 8;
  static constexpr int kUnit = kLanes * kVectors;
  static constexpr int kDotN[] = {4, 4, 2, 2};
  static constexpr int kTileM = 6;
  static constexpr int kOuterVectors[] = {8, 8, 8, 4, 4, 4};
  static constexpr int kColumnM = 12;
  static constexpr int kColumnRegisters = 28;

  static __m512 load(const float *x) { return _mm512_loadu_ps(x); }
  static __m512 one() { return _mm512_set1_ps(1); }
  static void store(float *to, __m512 x) { _mm512_storeu_ps(to, x); }
  static __m512 multiply(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  static __m512 multiply_add(__m512 a, __m512 b, __m512 sum) { return _mm512_fmadd_ps(a, b, sum); }

  static __m512 load_table(const void *codebook) { return _mm512_loadu_ps(codebook); }
  static __m512i load_codes(const uint8_t *packed) { return _mm512_loadu_si512(packed); }
  // vpermps reads the low 4 bits of each index.
  static __m512 look_up(__m512 table, __m512i codes) { return _mm512_permutexvar_ps(codes, table); }
  static __m512i next(__m512i codes) { return _mm512_srli_epi32(codes, 4); }

  static void split_even_odd(__m512 a, __m512 b, __m512 &even, __m512 &odd) {
    split_words(a, b, even, odd);
  }

  static __m512 load_some(const float *x, int64_t items) {
    return _mm512_maskz_loadu_ps(mask_of(items), x);
  }
  static __m512 broadcast(const float *x) { return _mm512_set1_ps(*x); }
  static __m512i half_words(const __m512i (&words)[1], int half) {
    return half == 0 ? words[0] : _mm512_srli_epi32(words[0], 16);
  }
};

}  // namespace

const MatmulKernels kAvx512Matmul = {
    NF4_DTYPE_FP32,
    Floats::kUnit,
    Floats::kTileM,
    1024,
    12,
    INT_MAX,
    Floats::kSumLanes,
    Floats::kSumLanes,
    {NF4_DTYPE_FP32,
     {prepare_units<Floats, Fp32>, prepare_units<Floats, Fp16>, prepare_units<Floats, Bf16>},
     dot<Floats>,
     nullptr},
    {NF4_DTYPE_FP32,
     {prepare_units<Floats, Fp32, false>, prepare_units<Floats, Fp16, false>,
      prepare_units<Floats, Bf16, false>},
     dot<Floats>,
     dot<Floats, true>},
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
