// Matmul of bf16 with vdpbf16ps, which multiplies pairs exactly and adds each product to a sum in
// fp32 with a rounding of its own; it flushes subnormal numbers, products and sums. Dot takes the
// codebook in bf16 from core/formats.hpp; docs/design/cpu.md compares the errors.
//
// Dot: half a byte is read per weight. 128 weights of a row take 3 shifts, 4 look-ups, and one more
// for the scales, plus 4 vdpbf16ps and an fma for each row of x. On a Zen 4 at 3.7 GHz, in the
// caches, 64 weights with their scales take 1.6, 2.1, 3.0, 3.7 ns for 1 to 4 rows of x; the
// vdpbf16ps and the fma alone, one a cycle, would take 0.7 to 2.7. One row is bound by memory if it
// is read from there.
//
// Tile: 24 vdpbf16ps for 10 loads, at 94 % of one a cycle; 64 weights take 3.3 ns to dequantize.
#include <climits>
#include <cstring>

#include "cpu/isa/avx512.hpp"
#include "cpu/matmul/column_loops.hpp"
#include "cpu/matmul/lane_loops.hpp"
#include "cpu/matmul/loops.hpp"
#include "cpu/matmul/outer_loops.hpp"
#include "cpu/matmul/scattered_loops.hpp"
#include "nf4/nf4.h"

namespace nf4::cpu {
namespace {

__m512bh as_bf16(__m512i x) { return (__m512bh)x; }

struct Bf16Pairs : Fp32Sums {
  using Item = uint16_t;
  using Operand = __m512i;
  using Codes = __m512i;
  using Order = ByWords<Bf16Pairs>;
  static constexpr int kLanes = 32;
  static constexpr int kVectors = 4;
  static constexpr int kUnit = kLanes * kVectors;
  static constexpr int kDotN[] = {4, 2, 2, 2};
  static constexpr int kTileM = 6;
  static constexpr int kOuterVectors[] = {8, 8, 8, 4, 4, 4};
  static constexpr int kColumnM = 12;
  static constexpr int kColumnRegisters = 28;

  static __m512i load(const uint16_t *x) { return _mm512_loadu_si512(x); }
  static __m512i one() { return _mm512_set1_epi16(0x3f80); }
  static void store(uint16_t *to, __m512i x) { _mm512_storeu_si512(to, x); }
  static __m512 multiply(__m512i a, __m512i b) { return multiply_add(a, b, zero()); }
  static __m512 multiply_add(__m512i a, __m512i b, __m512 sum) {
    return _mm512_dpbf16_ps(sum, as_bf16(a), as_bf16(b));
  }

  // The codebook is there twice, as vpermw reads the low 5 bits of each index.
  static __m512i load_table(const void *codebook) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)codebook));
  }
  static __m512i load_codes(const uint8_t *packed) { return _mm512_loadu_si512(packed); }
  static __m512i look_up(__m512i table, __m512i codes) {
    return _mm512_permutexvar_epi16(codes, table);
  }
  static __m512i next(__m512i codes) { return _mm512_srli_epi16(codes, 4); }

  static void split_even_odd(__m512i a, __m512i b, __m512i &even, __m512i &odd) {
    const __m512i first =
        _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32(4));
    const __m512i words = _mm512_or_si512(
        first, _mm512_slli_epi32(_mm512_add_epi32(first, _mm512_set1_epi32(2)), 16));
    even = _mm512_permutex2var_epi16(a, words, b);
    odd = _mm512_permutex2var_epi16(a, _mm512_add_epi16(words, _mm512_set1_epi16(1)), b);
  }

  static __m512i load_some(const uint16_t *x, int64_t items) {
    const uint32_t mask = items >= kLanes ? ~0u : (1u << items) - 1;
    return _mm512_maskz_loadu_epi16(mask, x);
  }
  // Reorders each 8 elements to 1 5 0 4 3 7 2 6: the order in which look_up() finds the codes of a
  // word whose first code is the high nibble.
  static __m512i pair_high_first(__m512i x) {
    return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 10, 11, 0, 1, 8, 9, 6,
                                                                       7, 14, 15, 4, 5, 12, 13)));
  }
  // The same for a word whose first code is the low nibble: 0 4 1 5 2 6 3 7.
  static __m512i pair(__m512i x) {
    return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4,
                                                                       5, 12, 13, 6, 7, 14, 15)));
  }
  static void store_eights(uint16_t *to, int64_t stride, __m512i x) {
    _mm_storeu_si128((__m128i *)to, _mm512_castsi512_si128(x));
    _mm_storeu_si128((__m128i *)(to + stride), _mm512_extracti32x4_epi32(x, 1));
    _mm_storeu_si128((__m128i *)(to + 2 * stride), _mm512_extracti32x4_epi32(x, 2));
    _mm_storeu_si128((__m128i *)(to + 3 * stride), _mm512_extracti32x4_epi32(x, 3));
  }
  static __m512i broadcast(const uint16_t *x) {
    int pair;
    __builtin_memcpy(&pair, x, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  // Combines the low or high halves of words of two columns: a code, and the next column's above
  // it.
  static __m512i half_words(const __m512i (&words)[2], int half) {
    const __m512i other_half =
        _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    constexpr __mmask64 kHigh = 0xcccccccccccccccc;
    if (half == 0) return _mm512_mask_shuffle_epi8(words[0], kHigh, words[1], other_half);
    return _mm512_mask_shuffle_epi8(words[1], ~kHigh, words[0], other_half);
  }
};

// Transposes 16 words of 16 rows: vector i gets word i of each row.
__attribute__((always_inline)) inline void load_transposed(const char *from, int64_t row_bytes,
                                                           __m512i (&out)[16]) {
  NF4_UNROLL
  for (int i = 0; i < 16; ++i) out[i] = _mm512_loadu_si512(from + i * row_bytes);
  transpose(out);
}

void transpose_codes(const uint8_t *packed, int64_t row_bytes, int rows, int64_t words,
                     uint32_t *out) {
  char padded[16][64] = {};
  for (int64_t i = 0; i < words; i += 16, packed += 64, out += 16 * kLaneBlockN) {
    const int64_t count = words - i < 16 ? words - i : 16;
    const char *from = reinterpret_cast<const char *>(packed);
    int64_t stride = row_bytes;
    if (rows < 16 || count < 16) {
      for (int row = 0; row < rows; ++row)
        std::memcpy(padded[row], packed + row * row_bytes, count * sizeof *out);
      from = padded[0];
      stride = sizeof padded[0];
    }
    __m512i vectors[16];
    load_transposed(from, stride, vectors);
    NF4_UNROLL
    for (int j = 0; j < 16; ++j) _mm512_store_si512(out + j * kLaneBlockN, vectors[j]);
  }
}

void transpose_scales(const float *scales, int64_t stride, int64_t count, float *out) {
  __m512i vectors[16];
  for (int64_t i = 0; i < count; i += 16, out += 16 * kLaneBlockN) {
    load_transposed(reinterpret_cast<const char *>(scales + i), stride * sizeof *scales, vectors);
    NF4_UNROLL
    for (int j = 0; j < 16; ++j) _mm512_store_si512(out + j * kLaneBlockN, vectors[j]);
  }
}

// A gather would take three times as long.
__m512 look_up_256(const float *table, __m512i indices) {
  __m512 values[8];
  NF4_UNROLL
  for (int i = 0; i < 8; ++i)
    values[i] = _mm512_permutex2var_ps(_mm512_loadu_ps(table + 32 * i), indices,
                                       _mm512_loadu_ps(table + 32 * i + 16));
  NF4_UNROLL
  for (int bit = 0; bit < 3; ++bit) {
    const __mmask16 set = _mm512_test_epi32_mask(indices, _mm512_set1_epi32(32 << bit));
    NF4_UNROLL
    for (int i = 0; i < 4 >> bit; ++i)
      values[i] = _mm512_mask_blend_ps(set, values[2 * i], values[2 * i + 1]);
  }
  return values[0];
}

void nested_scales(const uint8_t *codes, int64_t count, const float *table, float absmax,
                   float offset, float *out) {
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 some = Fp32Sums::mask_of(count - i);
    const __m512i indices = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(some, codes + i));
    const __m512 scaled = _mm512_mul_ps(look_up_256(table, indices), _mm512_set1_ps(absmax));
    _mm512_mask_storeu_ps(out + i, some, _mm512_add_ps(scaled, _mm512_set1_ps(offset)));
  }
}

void pair_rows(const void *a, const void *b, int64_t elements, void *out) {
  // In the order 0 32 1 33 ... 15 47.
  const __m512i first = _mm512_or_si512(
      iota(), _mm512_slli_epi32(_mm512_add_epi32(iota(), _mm512_set1_epi32(32)), 16));
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  const auto *row = static_cast<const uint16_t *>(a), *next = static_cast<const uint16_t *>(b);
  auto *to = static_cast<uint16_t *>(out);
  for (int64_t i = 0; i < elements; i += 32, to += 64) {
    const __m512i x = _mm512_loadu_si512(row + i), y = _mm512_loadu_si512(next + i);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(x, first, y));
    _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(x, second, y));
  }
}

struct Words {
  static constexpr int kBytes = 2;
  static __m512i load(const char *x) { return _mm512_loadu_si512(x); }
};

}  // namespace

const MatmulKernels kAvx512Bf16Matmul = {
    NF4_DTYPE_BF16,
    Bf16Pairs::kUnit,
    Bf16Pairs::kTileM,
    4096,
    4,
    INT_MAX,
    Bf16Pairs::kSumLanes,
    Bf16Pairs::kSumLanes,
    {NF4_DTYPE_BF16, {nullptr, nullptr, prepare_units<Bf16Pairs, Words>}, dot<Bf16Pairs>, nullptr},
    {NF4_DTYPE_BF16,
     {nullptr, nullptr, prepare_units<Bf16Pairs, Words, false>},
     dot<Bf16Pairs>,
     dot<Bf16Pairs, true>},
    x_sums<Bf16Pairs>,
    pair_columns<Bf16Pairs>,
    column_sums<Bf16Pairs>,
    gptq_columns<Bf16Pairs>,
    awq_columns<Bf16Pairs>,
    block_columns<Bf16Pairs>,
    scattered_columns<Bf16Pairs>,
    {nullptr, nullptr, nullptr},
    tile<Bf16Pairs>,
    outer<Bf16Pairs>,
    pair_rows,
    nullptr,
    transpose_codes,
    transpose_scales,
    pair_for_lanes<Bf16Pairs>,
    nested_scales,
    lanes<Bf16Pairs>,
};

}  // namespace nf4::cpu
