// AVX-512 kernels (F, BW, DQ, VL).
//
// Dequantize. Bytes moved per weight: half a byte in, 2 or 4 out, and the scale. A block
// has 16 different values, so they are multiplied and rounded once, as one vector, and a
// weight is then looked up: 3 instructions and a store for 32 weights of 16 bits or for 16
// of fp32, and per block 1 (fp32), 3 (fp16) or 6 (bf16) more. Outputs beyond the caches are
// bound by memory: a chiplet of a Zen 4 takes 28 GB/s of stores from one core or from all,
// and a core at 3.7 GHz makes 42 GB/s of bf16 and 48 of fp32.
//
// Quantize. 2 or 4 bytes in, half a byte out. 2 or 3 instructions for 16 weights find the
// scale, 7 the code (multiply, fix what is not finite, find the cell, look up its threshold
// and its codes, compare, choose; 14 where thresholds are too close for cells and are
// searched), 4 pack it. One core takes 12 ns for 64 weights (20 with the search): bound by
// these, two cores by memory (fp32).
//
// Tried, on that core; ns for 64 weights in the first-level cache, blocksize 64, unless
// otherwise said:
// - bf16 table of words (vpmovdw, broadcast), NaN masked per block: 2.7. Each word in both
//   halves of a dword, found by twice its code, NaN made harmless outside: a third fewer
//   instructions per block, predicted 2.2; 2.3, and 4.3 -> 3.2 for blocksize 32.
// - Stores past the caches from here rather than through vector.cpp's buffer: predicted
//   faster; 14336 x 4096 bf16 4.3 ms against 4.4 on one core, and only for aligned outputs.
//   Not kept.
// - Quantize block by block, infinities and NaN by three vfpclass and masks: 4096 x 4096
//   fp32 7.4 ms on one core. Batches of scales first, as the latency of a block's maximum and
//   division stood in the way, and vfixupimm: predicted 5; 5.3 (20 ns for 64 weights). Cells:
//   predicted 3; 3.3. A maximum that also counts what is not finite, and another pass for
//   the blocks that have it: 3.1, for twice the code. Not kept.
#include <immintrin.h>

#include "cpu/kernels.hpp"

namespace nf4::cpu {
namespace {

__m512i iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

__m512 as_floats(__m512i x) { return _mm512_castsi512_ps(x); }
__m512i as_integers(__m512 x) { return _mm512_castps_si512(x); }

// ---- Dequantize ----------------------------------------------------------------------

// The 16 products of a block, rounded, as a table of 32 words for vpermw, which reads the
// low 5 bits of each index.

struct Bf16Table {
  static constexpr int kBytes = 2;
  // The nibble twice over: its last bit, a neighbour's or none, chooses between equals.
  static constexpr int kEvenShift = 3;
  static constexpr int kOddShift = 7;
  __m512i values;

  // To nearest even by integers. The NaN among the products are such that the carry leaves
  // them NaN (DequantRun). vcvtneps2bf16 is of no use: it takes subnormals for zero.
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
void dequant(const DequantRun &run) {
  const __m512 codebook = _mm512_loadu_ps(run.codebook);
  const uint8_t *packed = run.packed;
  char *out = static_cast<char *>(run.out);
  const float *scale = run.scales;
  for (int64_t left = run.elements; left > 0; left -= run.blocksize) {
    const Table table(_mm512_mul_ps(codebook, _mm512_set1_ps(*scale++)));
    const int64_t elements = left < run.blocksize ? left : run.blocksize;
    for (int64_t i = 0; i < elements; i += kKernelStep) {
      decode(table, packed, out);
      packed += kKernelStep / 2;
      out += kKernelStep * Table::kBytes;
    }
  }
}

void stream(char *to, const char *from, int64_t lines) {
  for (; lines > 0; --lines, to += 64, from += 64)
    _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from));
}

// ---- Quantize ------------------------------------------------------------------------

struct Bf16 {
  static constexpr int kBytes = 2;
  static constexpr int kInfinity = 0x7f80;
  static __m512 widen(__m256i x) {
    return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
};

struct Fp16 {
  static constexpr int kBytes = 2;
  static constexpr int kInfinity = 0x7c00;
  static __m512 widen(__m256i x) { return _mm512_cvtph_ps(x); }
};

struct Fp32 {
  static constexpr int kBytes = 4;
};

template <class T>
__m512 load(const char *in) {
  return T::widen(_mm256_loadu_si256((const __m256i *)in));
}
template <>
__m512 load<Fp32>(const char *in) {
  return _mm512_loadu_ps(in);
}

// The largest finite |x|. As integers the magnitudes keep their order, and what is not
// finite comes after what is.
template <class T>
float block_absmax(const char *in, int64_t elements) {
  const __m512i infinity = _mm512_set1_epi16(T::kInfinity);
  __m512i largest = _mm512_setzero_si512();
  for (int64_t i = 0; i < elements; i += 32) {
    const __m512i x = _mm512_and_si512(_mm512_loadu_si512(in + 2 * i), _mm512_set1_epi16(0x7fff));
    const __mmask32 finite = _mm512_cmplt_epu16_mask(x, infinity);
    largest = _mm512_mask_max_epu16(largest, finite, largest, x);
  }
  return _mm512_reduce_max_ps(T::widen(
      _mm256_max_epu16(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1))));
}
template <>
float block_absmax<Fp32>(const char *in, int64_t elements) {
  const __m512i infinity = _mm512_set1_epi32(0x7f800000);
  __m512i largest = _mm512_setzero_si512();
  for (int64_t i = 0; i < elements; i += 16) {
    const __m512i x =
        _mm512_and_si512(_mm512_loadu_si512(in + 4 * i), _mm512_set1_epi32(0x7fffffff));
    const __mmask16 finite = _mm512_cmplt_epu32_mask(x, infinity);
    largest = _mm512_mask_max_epu32(largest, finite, largest, x);
  }
  return _mm512_reduce_max_ps(as_floats(largest));
}

// x times inverse; NaN to 0, infinities to 1 and -1.
__m512 normalise(__m512 x, __m512 inverse) {
  // By class of x: NaN to +0, -infinity to -1, +infinity to +1, the others stay.
  const __m512i fixes = _mm512_set1_epi32(0x00a90088);
  return _mm512_fixupimm_ps(_mm512_mul_ps(x, inverse), x, fixes, 0);
}

// Codes by looking up the cell of x. A code is in both nibbles of the low byte, so that
// either can be taken; what is above that byte is of no meaning.
struct CellEncoder {
  __m512 low_thresholds, high_thresholds;
  __m512i low_codes, high_codes;

  explicit CellEncoder(const QuantizeRun &run)
      : low_thresholds(_mm512_loadu_ps(run.cells->thresholds)),
        high_thresholds(_mm512_loadu_ps(run.cells->thresholds + 16)),
        low_codes(_mm512_loadu_si512(run.cells->codes)),
        high_codes(_mm512_loadu_si512(run.cells->codes + 16)) {}

  __m512i encode(__m512 x) const {
    // Beyond 2^23 floats are integers: the sum's low bits are the cell.
    constexpr float kIntegers = 0x1.8p23f;
    const __m512i cell =
        as_integers(_mm512_fmadd_ps(x, _mm512_set1_ps(Cells::kPerUnit), _mm512_set1_ps(kIntegers)));
    const __m512 threshold = _mm512_permutex2var_ps(low_thresholds, cell, high_thresholds);
    const __m512i codes = _mm512_permutex2var_epi32(low_codes, cell, high_codes);
    const __mmask16 above = _mm512_cmp_ps_mask(x, threshold, _CMP_GT_OQ);
    return _mm512_mask_srli_epi32(codes, above, codes, 8);
  }
};

// The thresholds as a search tree. Each table is the thresholds seen from the rank so far:
// entry r is the one that is asked next.
struct SearchEncoder {
  __m512 middle, by4, by2, by1;
  __m512i codes;  // in both nibbles

  explicit SearchEncoder(const QuantizeRun &run) {
    by1 = _mm512_maskz_loadu_ps(0x7fff, run.thresholds);
    by2 = _mm512_permutexvar_ps(_mm512_add_epi32(iota(), _mm512_set1_epi32(1)), by1);
    by4 = _mm512_permutexvar_ps(_mm512_add_epi32(iota(), _mm512_set1_epi32(3)), by1);
    middle = _mm512_set1_ps(run.thresholds[7]);
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)run.codes));
    codes = _mm512_or_si512(code, _mm512_slli_epi32(code, 4));
  }

  __m512i encode(__m512 x) const {
    const auto ask = [&](__m512i rank, __m512 table, int step) {
      const __mmask16 above = _mm512_cmp_ps_mask(x, _mm512_permutexvar_ps(rank, table), _CMP_GT_OQ);
      return _mm512_mask_or_epi32(rank, above, rank, _mm512_set1_epi32(step));
    };
    __m512i rank = _mm512_maskz_set1_epi32(_mm512_cmp_ps_mask(x, middle, _CMP_GT_OQ), 8);
    rank = ask(rank, by4, 4);
    rank = ask(rank, by2, 2);
    rank = ask(rank, by1, 1);
    return _mm512_permutexvar_epi32(rank, codes);
  }
};

// The bytes of 32 codes in two vectors.
__m128i pack(__m512i a, __m512i b) {
  const __m512i words = _mm512_packus_epi32(a, b);
  // The high nibble of the even word, the low nibble of the odd one.
  constexpr int kChoose = 0xca;
  const __m512i bytes = _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xf0), words,
                                                  _mm512_srli_epi32(words, 16), kChoose);
  // Lane by lane, two bytes of a and two of b.
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  return _mm_shuffle_epi8(_mm512_cvtepi32_epi8(bytes), order);
}

// Blocks whose scales are found before any of them is encoded, so that the latencies of one
// block's scale hide behind the others'.
constexpr int64_t kBatch = 16;

template <class T>
void find_scales(const QuantizeRun &run, const char *in, int64_t blocks, float *absmax,
                 float *inverse) {
  alignas(64) float scales[kBatch] = {};
  for (int64_t i = 0; i < blocks; ++i)
    scales[i] = block_absmax<T>(in + i * run.blocksize * T::kBytes, run.blocksize);
  for (int64_t i = 0; i < blocks; ++i) absmax[i] = scales[i];
  constexpr float kSmallestNormal = 0x1p-126f;
  const __m512 divisors = _mm512_max_ps(_mm512_load_ps(scales), _mm512_set1_ps(kSmallestNormal));
  _mm512_store_ps(inverse, _mm512_div_ps(_mm512_set1_ps(1), divisors));
}

template <class T, class Encoder>
void quantize_with(const Encoder &encoder, const QuantizeRun &run) {
  const char *in = static_cast<const char *>(run.in);
  uint8_t *packed = run.packed;
  alignas(64) float inverse[kBatch];
  for (int64_t first = 0; first < run.blocks; first += kBatch) {
    const int64_t blocks = run.blocks - first < kBatch ? run.blocks - first : kBatch;
    find_scales<T>(run, in, blocks, run.absmax + first, inverse);
    for (int64_t block = 0; block < blocks; ++block) {
      const __m512 factor = _mm512_set1_ps(inverse[block]);
      for (int64_t i = 0; i < run.blocksize; i += kKernelStep) {
        const __m512i a = encoder.encode(normalise(load<T>(in), factor));
        const __m512i b = encoder.encode(normalise(load<T>(in + 16 * T::kBytes), factor));
        _mm_storeu_si128((__m128i *)packed, pack(a, b));
        in += kKernelStep * T::kBytes;
        packed += kKernelStep / 2;
      }
    }
  }
}

template <class T>
void quantize(const QuantizeRun &run) {
  if (run.cells != nullptr)
    quantize_with<T>(CellEncoder(run), run);
  else
    quantize_with<T>(SearchEncoder(run), run);
}

// The codes of up to 16 scales: four levels of the search in a register of every 16th
// threshold, four in memory.
struct ScaleEncoder {
  const float *thresholds;
  __m512 by16;

  explicit ScaleEncoder(const float *all)
      : thresholds(all),
        by16(_mm512_i32gather_ps(_mm512_slli_epi32(iota(), 4), all, sizeof(float))) {}

  __m128i encode(__m512 x) const {
    const auto step = [&](__m512i code, __m512i next, __m512 threshold) {
      return _mm512_mask_mov_epi32(code, _mm512_cmp_ps_mask(x, threshold, _CMP_GT_OQ), next);
    };
    __m512i code = _mm512_setzero_si512();
    for (int by = 8; by > 0; by /= 2) {
      const __m512i next = _mm512_add_epi32(code, _mm512_set1_epi32(by));
      code = step(code, next, _mm512_permutexvar_ps(next, by16));
    }
    code = _mm512_slli_epi32(code, 4);
    for (int by = 8; by > 0; by /= 2) {
      const __m512i next = _mm512_add_epi32(code, _mm512_set1_epi32(by));
      code = step(code, next, _mm512_i32gather_ps(next, thresholds, sizeof(float)));
    }
    return _mm512_cvtepi32_epi8(code);
  }
};

void encode_scales(const ScaleRun &run) {
  const ScaleEncoder encoder(run.thresholds);
  const __m512 offset = _mm512_set1_ps(run.offset);
  const __m512 inverse = _mm512_set1_ps(run.inverse);
  for (int64_t i = 0; i < run.count; i += 16) {
    const int64_t left = run.count - i;
    const auto lanes = static_cast<__mmask16>(left < 16 ? (1 << left) - 1 : 0xffff);
    const __m512 scale = _mm512_maskz_loadu_ps(lanes, run.scales + i);
    const __m512 x = _mm512_mul_ps(_mm512_sub_ps(scale, offset), inverse);
    _mm_mask_storeu_epi8(run.codes + i, lanes, encoder.encode(x));
  }
}

}  // namespace

const KernelSet kAvx512Kernels = {
    {dequant<Fp32Table>, dequant<Fp16Table>, dequant<Bf16Table>},
    stream,
    {quantize<Fp32>, quantize<Fp16>, quantize<Bf16>},
    encode_scales,
};

}  // namespace nf4::cpu
