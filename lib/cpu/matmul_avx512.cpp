// AVX-512 matmul in fp32, which is exact to the last few bits for every x.
//
// Dot. 128 weights of a row take 7 shifts, 8 look-ups (vpermps: 16 floats are one register), and
// one more for the scales; with each column 9 multiplications. That is two instructions of 512 bits
// a cycle at best on a Zen 4: 1.7 ns for 64 weights and one column; measured in the caches, scales
// included, 2.5, 3.3, 4.8, 6.2 for 1 to 4 columns. Bound by these; two cores take 1.4 ms for
// 14336 x 4096, and their memory half of it to all of it.
//
// Tile. 24 fma for 10 loads, one a cycle, and 16 weights each: twice the time of bf16.
//
// Tried, ns for 64 weights in the caches without scales, one column:
// - x that is not aligned to 64 bytes: 2.3; aligned: 2.2.
// - All shifts first, then all look-ups: 2.6. Two sums in place of one: 2.2.
// - Up to six of the seven shifts by vpmulhuw, for other pipes: predicted 1.7; 2.4.
// - Scales spread by a broadcast and vpermilps: 2.2; by vpermps alone: 2.1.
// - No prefetch: 14336 x 4096 from memory 2.2 ms in place of 1.5.
#include "cpu/matmul_avx512.hpp"

#include <immintrin.h>

#include "cpu/matmul_kernels.hpp"
#include "nf4/nf4.h"

namespace nf4::cpu {
namespace {

struct Floats : Avx512Sums {
  using Item = float;
  using Operand = __m512;
  using Codes = __m512i;
  static constexpr int kLanes = 16;
  static constexpr int kPieces = 8;
  static constexpr int kUnit = kLanes * kPieces;
  static constexpr int kDotRows[] = {4, 4, 2, 2};
  static constexpr int kTileColumns = 6;

  static __m512 load(const float *x) { return _mm512_loadu_ps(x); }
  static void store(float *to, __m512 x) { _mm512_storeu_ps(to, x); }
  static __m512 multiply(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  static __m512 multiply_add(__m512 a, __m512 b, __m512 sum) { return _mm512_fmadd_ps(a, b, sum); }

  static __m512 load_table(const void *codebook) { return _mm512_loadu_ps(codebook); }
  static __m512i load_codes(const uint8_t *packed) { return _mm512_loadu_si512(packed); }
  // vpermps reads the low 4 bits of each index.
  static __m512 look_up(__m512 table, __m512i codes) { return _mm512_permutexvar_ps(codes, table); }
  static __m512i next(__m512i codes) { return _mm512_srli_epi32(codes, 4); }

  static void take_apart(__m512 a, __m512 b, __m512 &even, __m512 &odd) {
    const __m512i first =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    even = _mm512_permutex2var_ps(a, first, b);
    odd = _mm512_permutex2var_ps(a, _mm512_add_epi32(first, _mm512_set1_epi32(1)), b);
  }
};

struct FromFp32 {
  static constexpr int kBytes = 4;
  static __m512 load(const char *x) { return _mm512_loadu_ps(x); }
};
struct FromFp16 {
  static constexpr int kBytes = 2;
  static __m512 load(const char *x) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
  }
};
struct FromBf16 {
  static constexpr int kBytes = 2;
  static __m512 load(const char *x) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16));
  }
};

}  // namespace

const MatmulKernels kAvx512Matmul = {
    NF4_DTYPE_FP32,
    Floats::kUnit,
    Floats::kTileColumns,
    1024,
    8,
    {prepare_units<Floats, FromFp32>, prepare_units<Floats, FromFp16>,
     prepare_units<Floats, FromBf16>},
    dot<Floats>,
    {nullptr, convert<Floats, FromFp16>, convert<Floats, FromBf16>},
    tile<Floats>,
};

}  // namespace nf4::cpu
