// Dequantize with AVX2 (and F16C).
//
// The 16 values of a block are multiplied and rounded once, into two tables of bytes, low and high,
// for vpshufb: 11 instructions and 2 stores for 32 weights of 16 bits, and about 17 more per block.
// fp32 takes two vpermps and a blend: 6 instructions and a store for 8 weights. In the L1 cache, 64
// weights at blocksize 64 take 3.7 ns (bf16) or 3.8 ns (fp32) on a Zen 4 at 3.7 GHz, about as long
// as its memory takes.
#include "cpu/isa/avx2.hpp"

#include "cpu/dequant/block_loops.hpp"
#include "cpu/dequant/group_loops.hpp"
#include "cpu/dequant/kernels.hpp"
#include "cpu/dequant/word_loops.hpp"

namespace nf4::cpu {
namespace {

Floats16 multiply(const Floats16 &codebook, __m256 scale) {
  return {_mm256_mul_ps(codebook.low, scale), _mm256_mul_ps(codebook.high, scale)};
}

// Rounds to nearest even with integer instructions. NaN inputs are canonical, so the rounding carry
// keeps them NaN (DequantArgs).
__m256i round(Bf16, __m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  return _mm256_srli_epi32(rounded, 16);
}

// Returns 16 words, indexed by code.
__m256i round(Bf16, const Floats16 &x) {
  const __m256i by_lane = _mm256_packus_epi32(round(Bf16{}, x.low), round(Bf16{}, x.high));
  return _mm256_permute4x64_epi64(by_lane, 0xd8);
}
__m256i round(Fp16, const Floats16 &x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return _mm256_set_m128i(_mm256_cvtps_ph(x.high, kNearest), _mm256_cvtps_ph(x.low, kNearest));
}

// The rounded products of a block as two tables of 16 bytes, each in both lanes. vpshufb looks up
// 32 codes in each table.
template <class T>
struct WordTable {
  static constexpr int kBytes = 2;
  __m256i low_bytes, high_bytes;

  explicit WordTable(const Floats16 &products) {
    const __m256i split = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0,
                                           2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    const __m256i bytes =
        _mm256_permute4x64_epi64(_mm256_shuffle_epi8(round(T{}, products), split), 0xd8);
    low_bytes = _mm256_permute2x128_si256(bytes, bytes, 0x00);
    high_bytes = _mm256_permute2x128_si256(bytes, bytes, 0x11);
  }

  template <class Kind>
  void decode(const uint8_t *packed, char *out) const {
    // The middle dwords are swapped, so that the unpacking at the end leaves everything in order.
    const __m128i bytes = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)packed), 0xd8);
    const __m256i words = _mm256_cvtepu8_epi16(bytes);
    // Expands a byte to two bytes; the first has the first code in its low bits.
    const __m256i pairs =
        Kind::kHighFirst ? _mm256_or_si256(_mm256_srli_epi16(words, 4), _mm256_slli_epi16(words, 8))
                         : _mm256_or_si256(words, _mm256_slli_epi16(words, 4));
    const __m256i codes = _mm256_and_si256(pairs, _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(low_bytes, codes);
    const __m256i high = _mm256_shuffle_epi8(high_bytes, codes);
    _mm256_storeu_si256((__m256i *)out, _mm256_unpacklo_epi8(low, high));
    _mm256_storeu_si256((__m256i *)(out + 32), _mm256_unpackhi_epi8(low, high));
  }
};

struct FloatTable {
  static constexpr int kBytes = 4;
  Floats16 values;

  explicit FloatTable(const Floats16 &products) : values(products) {}

  template <class Kind>
  void decode(const uint8_t *packed, char *out) const {
    for (int i = 0; i < kKernelStep / 8; ++i)
      _mm256_storeu_ps((float *)(out + 32 * i), decode8<Kind>(packed + 4 * i));
  }

  template <class Kind>
  __m256 decode8(const uint8_t *packed) const {
    int bytes;
    __builtin_memcpy(&bytes, packed, sizeof bytes);
    const __m256i shifts = Kind::kHighFirst ? _mm256_setr_epi32(4, 0, 12, 8, 20, 16, 28, 24)
                                            : _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    return values.look_up(_mm256_srlv_epi32(_mm256_set1_epi32(bytes), shifts));
  }
};

// The kind of weight that a kernel is compiled for: which nibble of a byte comes first, and how the
// 16 values of a block are computed.
struct Floats4 {
  static constexpr bool kHighFirst = true;
  static Floats16 values(const DequantArgs &args, int64_t block) {
    return multiply(Floats16::load(args.codebook), _mm256_set1_ps(args.scales[block]));
  }
};
struct Integers4 {
  static constexpr bool kHighFirst = false;
  static Floats16 values(const DequantArgs &args, int64_t group) {
    const Floats16 codes = Floats16::load(args.codebook);
    const __m256 zero = _mm256_set1_ps(args.zeros[group]);
    return multiply({_mm256_add_ps(codes.low, zero), _mm256_add_ps(codes.high, zero)},
                    _mm256_set1_ps(args.scales[group]));
  }
};

// Vectors of 8 words.
struct Words {
  using Vector = uint32_t __attribute__((vector_size(32)));
  static constexpr int kLanes = 8;

  // Loads the first `lanes` words; the other lanes are zero.
  static Vector load(const uint32_t *words, int64_t lanes) {
    if (lanes >= kLanes) return (Vector)_mm256_loadu_si256((const __m256i *)words);
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(lanes)),
                                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return (Vector)_mm256_maskload_epi32((const int *)words, mask);
  }
  static Vector set(int x) { return (Vector)_mm256_set1_epi32(x); }
  // Rotates to the left by less than 32 bits.
  static Vector rotate(Vector x, Vector bits) {
    return (Vector)_mm256_or_si256(_mm256_sllv_epi32((__m256i)x, (__m256i)bits),
                                   _mm256_srlv_epi32((__m256i)x, (__m256i)(32 - bits)));
  }
  static void store(uint8_t *to, Vector x) { _mm256_storeu_si256((__m256i *)to, (__m256i)x); }
  // Word c of vector j becomes word 8 c + j of all words.
  static void interleave(Vector (&x)[8]) { transpose(x); }
  static void deinterleave(Vector (&x)[8]) { transpose(x); }
  static void transpose(Vector (&x)[8]) { cpu::transpose(x); }
};

void store_nontemporal(char *to, const char *from, int64_t lines) {
  for (; lines > 0; --lines, to += 64, from += 64) {
    _mm256_stream_si256((__m256i *)to, _mm256_loadu_si256((const __m256i *)from));
    _mm256_stream_si256((__m256i *)(to + 32), _mm256_loadu_si256((const __m256i *)(from + 32)));
  }
}

}  // namespace

const DequantKernels kAvx2Dequant = {
    {dequant<Floats4, FloatTable>, dequant<Floats4, WordTable<Fp16>>,
     dequant<Floats4, WordTable<Bf16>>},
    {dequant<Integers4, FloatTable>, dequant<Integers4, WordTable<Fp16>>,
     dequant<Integers4, WordTable<Bf16>>},
    read_groups<Int4Lanes>,
    gptq_words<Words>,
    awq_words<Words>,
    awq_from_gptq<Words>,
    gptq_rows<Words>,
    awq_rows<Words>,
    store_nontemporal,
};

}  // namespace nf4::cpu
