// Dequantize with AVX-512 (F, BW, DQ, VL).
//
// Each weight reads half a byte and writes 2 or 4, and the scales are read too. A block has 16
// different values, so they are multiplied and rounded once, as one vector, and each weight is then
// a look-up: 3 instructions and a store for 32 weights of 16 bits or for 16 of fp32, plus 1 (fp32),
// 3 (fp16) or 6 (bf16) instructions per block. Outputs larger than the caches are bound by memory:
// on a Zen 4 a chiplet takes 28 GB/s of stores, and one core at 3.7 GHz produces 42 GB/s of bf16
// and 48 of fp32.
#include "cpu/isa/avx512.hpp"

#include "cpu/dequant/group_loops.hpp"
#include "cpu/dequant/kernels.hpp"
#include "cpu/dequant/word_loops.hpp"

namespace nf4::cpu {
namespace {

// The 16 rounded products of a block, as a table of 32 words for vpermw, which reads the low 5 bits
// of each index.

struct Bf16Table {
  static constexpr int kBytes = 2;
  // These shifts bring a nibble into the 5 index bits: the high nibble from the low byte of a word,
  // the low nibble from the high byte. The byte holds the nibble twice, so the fifth bit is a bit
  // of a neighbour or zero; it chooses between two equal entries.
  static constexpr int kHighShift = 3;
  static constexpr int kLowShift = 7;
  __m512i values;

  // Rounds to nearest even with integer instructions. NaN inputs are canonical, so the rounding
  // carry keeps them NaN (DequantArgs). vcvtneps2bf16 would flush subnormals.
  explicit Bf16Table(__m512 products) {
    const __m512i bits = as_integers(products);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i high_word_twice = _mm512_broadcast_i32x4(
        _mm_setr_epi8(2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15));
    values = _mm512_shuffle_epi8(rounded, high_word_twice);
  }
};

struct Fp16Table {
  static constexpr int kBytes = 2;
  // The fifth index bit is a bit of a neighbour or zero; it chooses between two equal entries.
  static constexpr int kHighShift = 4;
  static constexpr int kLowShift = 8;
  __m512i values;

  explicit Fp16Table(__m512 products)
      : values(_mm512_broadcast_i64x4(
            _mm512_cvtps_ph(products, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))) {}
};

struct Fp32Table {
  static constexpr int kBytes = 4;
  __m512 values;

  explicit Fp32Table(__m512 products) : values(products) {}
};

__m512i broadcast16(const uint8_t *packed) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)packed));
}

// The kind of weight that a kernel is compiled for: which nibble of a byte comes first, and how the
// 16 values of a block are computed.
struct Floats4 {
  static constexpr bool kHighFirst = true;
  static __m512 values(const DequantArgs &args, int64_t block) {
    return _mm512_mul_ps(_mm512_loadu_ps(args.codebook), _mm512_set1_ps(args.scales[block]));
  }
};
struct Integers4 {
  static constexpr bool kHighFirst = false;
  static __m512 values(const DequantArgs &args, int64_t group) {
    const __m512 differences =
        _mm512_add_ps(_mm512_loadu_ps(args.codebook), _mm512_set1_ps(args.zeros[group]));
    return _mm512_mul_ps(differences, _mm512_set1_ps(args.scales[group]));
  }
};

// Dequantizes 32 elements from 16 bytes.
template <class Kind, class Table>
void decode(const Table &table, const uint8_t *packed, char *out) {
  // Byte i goes to words 2i and 2i + 1: to the low byte for the high nibble, to the high byte for
  // the low nibble.
  const __m512i spread = _mm512_add_epi32(
      _mm512_set1_epi32(Kind::kHighFirst ? 0x00808000 : static_cast<int>(0x80000080)),
      _mm512_mullo_epi32(iota(), _mm512_set1_epi32(Kind::kHighFirst ? 0x01000001 : 0x00010100)));
  const __m512i shifts =
      _mm512_set1_epi32(Kind::kHighFirst ? Table::kLowShift << 16 | Table::kHighShift
                                         : Table::kHighShift << 16 | Table::kLowShift);
  const __m512i indices =
      _mm512_srlv_epi16(_mm512_shuffle_epi8(broadcast16(packed), spread), shifts);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(indices, table.values));
}

template <class Kind>
void decode(const Fp32Table &table, const uint8_t *packed, char *out) {
  // Byte i goes to dwords 2i and 2i + 1. The dword for the high nibble drops the low one.
  const __m512i spread = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(0x80808000)),
                                          _mm512_srli_epi32(iota(), 1));
  const __m512i shifts = _mm512_set1_epi64(Kind::kHighFirst ? 4 : int64_t{4} << 32);
  for (int half = 0; half < 2; ++half) {
    const __m512i from = _mm512_add_epi32(spread, _mm512_set1_epi32(8 * half));
    const __m512i indices =
        _mm512_srlv_epi32(_mm512_shuffle_epi8(broadcast16(packed), from), shifts);
    _mm512_storeu_ps(out + 64 * half, _mm512_permutexvar_ps(indices, table.values));
  }
}

template <class Kind, class Table>
void dequant(const DequantArgs &args) {
  const uint8_t *packed = args.packed;
  char *out = static_cast<char *>(args.out);
  int64_t block = 0;
  for (int64_t left = args.elements; left > 0; left -= args.blocksize) {
    const Table table(Kind::values(args, block++));
    const int64_t elements = left < args.blocksize ? left : args.blocksize;
    for (int64_t i = 0; i < elements; i += kKernelStep) {
      decode<Kind>(table, packed, out);
      packed += kKernelStep / 2;
      out += kKernelStep * Table::kBytes;
    }
  }
}

// Vectors of 16 words.
struct Words {
  using Vector = uint32_t __attribute__((vector_size(64)));
  static constexpr int kLanes = 16;

  // Loads the first `lanes` words; the other lanes are zero.
  static Vector load(const uint32_t *words, int64_t lanes) {
    const auto mask = static_cast<__mmask16>(lanes >= kLanes ? 0xffff : (1 << lanes) - 1);
    return (Vector)_mm512_maskz_loadu_epi32(mask, words);
  }
  static Vector set(int x) { return (Vector)_mm512_set1_epi32(x); }
  // Rotates to the left by less than 32 bits.
  static Vector rotate(Vector x, Vector bits) {
    return (Vector)_mm512_rolv_epi32((__m512i)x, (__m512i)bits);
  }
  static void store(uint8_t *to, Vector x) { _mm512_storeu_si512(to, (__m512i)x); }
  // Word c of vector j becomes word 8 c + j of all words.
  static void interleave(Vector (&x)[8]) {
    __m512i b[8];
    nf4::cpu::transpose_lanes(x, b);
    NF4_UNROLL
    for (int i = 0; i < 4; i += 2) {
      // Gathers words i and i + 1 of a lane from all 8 vectors.
      const __m512i low = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x44);
      const __m512i high = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xee);
      const __m512i next_low = _mm512_shuffle_i32x4(b[i + 1], b[i + 5], 0x44);
      const __m512i next_high = _mm512_shuffle_i32x4(b[i + 1], b[i + 5], 0xee);
      x[i / 2] = (Vector)_mm512_shuffle_i32x4(low, next_low, 0x88);
      x[i / 2 + 2] = (Vector)_mm512_shuffle_i32x4(low, next_low, 0xdd);
      x[i / 2 + 4] = (Vector)_mm512_shuffle_i32x4(high, next_high, 0x88);
      x[i / 2 + 6] = (Vector)_mm512_shuffle_i32x4(high, next_high, 0xdd);
    }
  }
  // The inverse of interleave().
  static void deinterleave(Vector (&x)[8]) {
    Vector b[8];
    __m512i words[8];
    NF4_UNROLL
    for (int i = 0; i < 4; i += 2) {
      const __m512i *from = (const __m512i *)(x + i / 2);
      const __m512i low = _mm512_shuffle_i32x4(from[0], from[2], 0x88);
      const __m512i high = _mm512_shuffle_i32x4(from[4], from[6], 0x88);
      const __m512i odd_low = _mm512_shuffle_i32x4(from[0], from[2], 0xdd);
      const __m512i odd_high = _mm512_shuffle_i32x4(from[4], from[6], 0xdd);
      b[i] = (Vector)_mm512_shuffle_i32x4(low, high, 0x88);
      b[i + 1] = (Vector)_mm512_shuffle_i32x4(low, high, 0xdd);
      b[i + 4] = (Vector)_mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
      b[i + 5] = (Vector)_mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
    }
    nf4::cpu::transpose_lanes(b, words);
    NF4_UNROLL
    for (int i = 0; i < 8; ++i) x[i] = (Vector)words[i];
  }
  static void transpose(Vector (&x)[kLanes]) { nf4::cpu::transpose(x); }
};

void store_nontemporal(char *to, const char *from, int64_t lines) {
  for (; lines > 0; --lines, to += 64, from += 64)
    _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from));
}

}  // namespace

const DequantKernels kAvx512Dequant = {
    {dequant<Floats4, Fp32Table>, dequant<Floats4, Fp16Table>, dequant<Floats4, Bf16Table>},
    {dequant<Integers4, Fp32Table>, dequant<Integers4, Fp16Table>, dequant<Integers4, Bf16Table>},
    read_groups<Fp32Sums>,
    gptq_words<Words>,
    awq_words<Words>,
    awq_from_gptq<Words>,
    gptq_rows<Words>,
    awq_rows<Words>,
    store_nontemporal,
};

}  // namespace nf4::cpu
