// Dequantize by AVX-512 (F, BW, DQ, VL).
//
// Bytes moved per weight: half a byte in, 2 or 4 out, and the scale. A block has 16 different
// values, so they are multiplied and rounded once, as one vector, and a weight is then looked up: 3
// instructions and a store for 32 weights of 16 bits or for 16 of fp32, and per block 1 (fp32), 3
// (fp16) or 6 (bf16) more. Outputs larger than the caches are bound by memory: on a Zen 4 a chiplet
// takes 28 GB/s of stores, and one core at 3.7 GHz produces 42 GB/s of bf16 and 48 of fp32.
#include "cpu/isa/avx512.hpp"

#include "cpu/dequant/kernels.hpp"

namespace nf4::cpu {
namespace {

// The 16 products of a block, rounded, as a table of 32 words for vpermw, which reads the
// low 5 bits of each index.

struct Bf16Table {
  static constexpr int kBytes = 2;
  // The nibble twice over: its last bit, a neighbour's or none, chooses between equals.
  static constexpr int kEvenShift = 3;
  static constexpr int kOddShift = 7;
  __m512i values;

  // To nearest even by integers. The NaN among the products are such that the carry leaves
  // them NaN (DequantArgs). vcvtneps2bf16 would flush subnormals.
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
  // The fifth bit, a neighbour's or none, chooses between equals.
  static constexpr int kEvenShift = 4;
  static constexpr int kOddShift = 8;
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

// 32 elements from 16 bytes.
template <class Table>
void decode(const Table &table, const uint8_t *packed, char *out) {
  // Byte i to the low byte of word 2i and to the high byte of word 2i + 1.
  const __m512i spread = _mm512_add_epi32(
      _mm512_set1_epi32(0x00808000), _mm512_mullo_epi32(iota(), _mm512_set1_epi32(0x01000001)));
  const __m512i shifts = _mm512_set1_epi32(Table::kOddShift << 16 | Table::kEvenShift);
  const __m512i indices =
      _mm512_srlv_epi16(_mm512_shuffle_epi8(broadcast16(packed), spread), shifts);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(indices, table.values));
}

void decode(const Fp32Table &table, const uint8_t *packed, char *out) {
  // Byte i to dwords 2i and 2i + 1, of which the first drops its low nibble.
  const __m512i spread = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(0x80808000)),
                                          _mm512_srli_epi32(iota(), 1));
  const __m512i shifts = _mm512_set1_epi64(4);
  for (int half = 0; half < 2; ++half) {
    const __m512i from = _mm512_add_epi32(spread, _mm512_set1_epi32(8 * half));
    const __m512i indices =
        _mm512_srlv_epi32(_mm512_shuffle_epi8(broadcast16(packed), from), shifts);
    _mm512_storeu_ps(out + 64 * half, _mm512_permutexvar_ps(indices, table.values));
  }
}

template <class Table>
void dequant(const DequantArgs &args) {
  const __m512 codebook = _mm512_loadu_ps(args.codebook);
  const uint8_t *packed = args.packed;
  char *out = static_cast<char *>(args.out);
  const float *scale = args.scales;
  for (int64_t left = args.elements; left > 0; left -= args.blocksize) {
    const Table table(_mm512_mul_ps(codebook, _mm512_set1_ps(*scale++)));
    const int64_t elements = left < args.blocksize ? left : args.blocksize;
    for (int64_t i = 0; i < elements; i += kKernelStep) {
      decode(table, packed, out);
      packed += kKernelStep / 2;
      out += kKernelStep * Table::kBytes;
    }
  }
}

void store_nontemporal(char *to, const char *from, int64_t lines) {
  for (; lines > 0; --lines, to += 64, from += 64)
    _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from));
}

}  // namespace

const DequantKernels kAvx512Dequant = {
    {dequant<Fp32Table>, dequant<Fp16Table>, dequant<Bf16Table>},
    store_nontemporal,
};

}  // namespace nf4::cpu
