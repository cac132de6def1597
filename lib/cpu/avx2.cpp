// AVX2 kernels (with F16C), built as those of avx512.cpp, whose account of bytes holds here.
//
// Dequantize. The 16 values of a block lie in two tables of bytes, low and high, which
// vpshufb looks up: 11 instructions and 2 stores for 32 weights of 16 bits, about 17 more
// per block. fp32: two vpermps and a blend, 6 instructions and a store for 8 weights. In the
// first-level cache 3.7 ns for 64 weights of bf16 and 3.8 of fp32 at blocksize 64, on a Zen 4
// at 3.7 GHz, which is near what its memory takes.
//
// Quantize. About 8 instructions for 8 weights to scale and to fix what is not finite, 14 to
// search, 3 to pack. Bound by these: 27.5 ns for 64 weights.
//
// Tried: what avx512.cpp tells; its lessons were taken over, but for cells, whose tables of
// 32 entries are four of these registers. Scales searched by gathers, predicted 0.9 ms for
// those of 4096 x 4096: 1.6, as long as one by one.
#include <immintrin.h>

#include "cpu/kernels.hpp"

namespace nf4::cpu {
namespace {

// ---- Dequantize ----------------------------------------------------------------------

// 16 floats by code.
struct Floats16 {
  __m256 low, high;
};

Floats16 load_codebook(const float *codebook) {
  return {_mm256_loadu_ps(codebook), _mm256_loadu_ps(codebook + 8)};
}

Floats16 multiply(const Floats16 &codebook, __m256 scale) {
  return {_mm256_mul_ps(codebook.low, scale), _mm256_mul_ps(codebook.high, scale)};
}

struct Bf16 {
  static constexpr int kBytes = 2;
  static constexpr int kInfinity = 0x7f80;

  // To nearest even by integers. The NaN among the products are such that the carry leaves
  // them NaN (DequantRun).
  static __m256i round(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    return _mm256_srli_epi32(rounded, 16);
  }
  // 16 words, by code.
  static __m256i round(const Floats16 &x) {
    const __m256i by_lane = _mm256_packus_epi32(round(x.low), round(x.high));
    return _mm256_permute4x64_epi64(by_lane, 0xd8);
  }
  static __m256 widen(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }
};

struct Fp16 {
  static constexpr int kBytes = 2;
  static constexpr int kInfinity = 0x7c00;

  static __m256i round(const Floats16 &x) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm256_set_m128i(_mm256_cvtps_ph(x.high, kNearest), _mm256_cvtps_ph(x.low, kNearest));
  }
  static __m256 widen(__m128i x) { return _mm256_cvtph_ps(x); }
};

// The rounded products of a block as two tables of 16 bytes, each in both lanes: vpshufb
// looks 32 codes up in each.
template <class T>
struct Table16 {
  static constexpr int kBytes = 2;
  __m256i low_bytes, high_bytes;

  explicit Table16(const Floats16 &products) {
    const __m256i split = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0,
                                           2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    const __m256i bytes =
        _mm256_permute4x64_epi64(_mm256_shuffle_epi8(T::round(products), split), 0xd8);
    low_bytes = _mm256_permute2x128_si256(bytes, bytes, 0x00);
    high_bytes = _mm256_permute2x128_si256(bytes, bytes, 0x11);
  }

  void decode(const uint8_t *packed, char *out) const {
    // The middle dwords swapped, so that the unpacking at the end leaves all in order.
    const __m128i bytes = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)packed), 0xd8);
    const __m256i words = _mm256_cvtepu8_epi16(bytes);
    const __m256i codes =
        _mm256_and_si256(_mm256_or_si256(_mm256_srli_epi16(words, 4), _mm256_slli_epi16(words, 8)),
                         _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(low_bytes, codes);
    const __m256i high = _mm256_shuffle_epi8(high_bytes, codes);
    _mm256_storeu_si256((__m256i *)out, _mm256_unpacklo_epi8(low, high));
    _mm256_storeu_si256((__m256i *)(out + 32), _mm256_unpackhi_epi8(low, high));
  }
};

struct Table32 {
  static constexpr int kBytes = 4;
  Floats16 values;

  explicit Table32(const Floats16 &products) : values(products) {}

  void decode(const uint8_t *packed, char *out) const {
    for (int i = 0; i < kKernelStep / 8; ++i)
      _mm256_storeu_ps((float *)(out + 32 * i), decode8(packed + 4 * i));
  }

  __m256 decode8(const uint8_t *packed) const {
    int bytes;
    __builtin_memcpy(&bytes, packed, sizeof bytes);
    const __m256i shifts = _mm256_setr_epi32(4, 0, 12, 8, 20, 16, 28, 24);
    const __m256i codes = _mm256_srlv_epi32(_mm256_set1_epi32(bytes), shifts);
    // vpermps reads three bits of a code; the fourth, as the sign, chooses the table.
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(values.low, codes),
                            _mm256_permutevar8x32_ps(values.high, codes), upper);
  }
};

template <class Table>
void dequant(const DequantRun &run) {
  const Floats16 codebook = load_codebook(run.codebook);
  const uint8_t *packed = run.packed;
  char *out = static_cast<char *>(run.out);
  const float *scale = run.scales;
  for (int64_t left = run.elements; left > 0; left -= run.blocksize) {
    const Table table(multiply(codebook, _mm256_set1_ps(*scale++)));
    const int64_t elements = left < run.blocksize ? left : run.blocksize;
    for (int64_t i = 0; i < elements; i += kKernelStep) {
      table.decode(packed, out);
      packed += kKernelStep / 2;
      out += kKernelStep * Table::kBytes;
    }
  }
}

void stream(char *to, const char *from, int64_t lines) {
  for (; lines > 0; --lines, to += 64, from += 64) {
    _mm256_stream_si256((__m256i *)to, _mm256_loadu_si256((const __m256i *)from));
    _mm256_stream_si256((__m256i *)(to + 32), _mm256_loadu_si256((const __m256i *)(from + 32)));
  }
}

// ---- Quantize ------------------------------------------------------------------------

struct Fp32 {
  static constexpr int kBytes = 4;
};

template <class T>
__m256 load(const char *in) {
  return T::widen(_mm_loadu_si128((const __m128i *)in));
}
template <>
__m256 load<Fp32>(const char *in) {
  return _mm256_loadu_ps((const float *)in);
}

__m256i load_bits(const char *in) { return _mm256_loadu_si256((const __m256i *)in); }

// The largest finite |x|. As integers the magnitudes keep their order, and what is not
// finite comes after what is.
template <class T>
float block_absmax(const char *in, int64_t elements) {
  const __m256i infinity = _mm256_set1_epi16(T::kInfinity);
  __m256i largest = _mm256_setzero_si256();
  for (int64_t i = 0; i < elements; i += 16) {
    const __m256i x = _mm256_and_si256(load_bits(in + 2 * i), _mm256_set1_epi16(0x7fff));
    const __m256i finite = _mm256_cmpgt_epi16(infinity, x);
    largest = _mm256_max_epi16(largest, _mm256_and_si256(x, finite));
  }
  const __m128i half =
      _mm_max_epi16(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  // The one reduction of words that there is finds the smallest.
  const __m128i ones = _mm_set1_epi16(-1);
  const __m128i word = _mm_xor_si128(_mm_minpos_epu16(_mm_xor_si128(half, ones)), ones);
  return _mm256_cvtss_f32(T::widen(word));
}
template <>
float block_absmax<Fp32>(const char *in, int64_t elements) {
  const __m256i infinity = _mm256_set1_epi32(0x7f800000);
  __m256i largest = _mm256_setzero_si256();
  for (int64_t i = 0; i < elements; i += 8) {
    const __m256i x = _mm256_and_si256(load_bits(in + 4 * i), _mm256_set1_epi32(0x7fffffff));
    const __m256i finite = _mm256_cmpgt_epi32(infinity, x);
    largest = _mm256_max_epi32(largest, _mm256_and_si256(x, finite));
  }
  __m128i x = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(x));
}

// x times inverse; NaN to 0, infinities to 1 and -1.
__m256 normalise(__m256 x, __m256 inverse) {
  const __m256 product = _mm256_mul_ps(x, inverse);
  const __m256 sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0f));
  const __m256i magnitude = _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), x));
  const __m256 special =
      _mm256_castsi256_ps(_mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f7fffff)));
  const __m256 is_number = _mm256_cmp_ps(x, x, _CMP_ORD_Q);
  const __m256 end = _mm256_and_ps(is_number, _mm256_or_ps(sign, _mm256_set1_ps(1)));
  return _mm256_blendv_ps(product, end, special);
}

// The thresholds as a search tree, a table for each of its levels.
struct Encoder {
  __m256 middle, by4, by2, by1;
  __m256i codes;

  explicit Encoder(const QuantizeRun &run) {
    const float *t = run.thresholds;
    middle = _mm256_set1_ps(t[7]);
    by4 = _mm256_setr_ps(t[3], t[11], 0, 0, 0, 0, 0, 0);
    by2 = _mm256_setr_ps(t[1], t[5], t[9], t[13], 0, 0, 0, 0);
    by1 = _mm256_setr_ps(t[0], t[2], t[4], t[6], t[8], t[10], t[12], t[14]);
    codes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)run.codes));
  }

  // The number of thresholds below x.
  __m256i rank(__m256 x) const {
    const auto descend = [&](__m256i node, __m256 table) {
      const __m256 threshold = _mm256_permutevar8x32_ps(table, node);
      const __m256i above = _mm256_castps_si256(_mm256_cmp_ps(x, threshold, _CMP_GT_OQ));
      return _mm256_sub_epi32(_mm256_add_epi32(node, node), above);
    };
    const __m256i upper = _mm256_castps_si256(_mm256_cmp_ps(x, middle, _CMP_GT_OQ));
    return descend(descend(descend(_mm256_srli_epi32(upper, 31), by4), by2), by1);
  }

  // The bytes of 32 ranks.
  __m128i pack(__m256i a, __m256i b, __m256i c, __m256i d) const {
    const __m256i by_lane =
        _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
    const __m256i ranks =
        _mm256_permutevar8x32_epi32(by_lane, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const __m256i words =
        _mm256_maddubs_epi16(_mm256_shuffle_epi8(codes, ranks), _mm256_set1_epi16(0x0110));
    return _mm256_castsi256_si128(
        _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0xd8));
  }
};

// Blocks whose scales are found before any of them is encoded, so that the latencies of one
// block's scale hide behind the others'.
constexpr int64_t kBatch = 8;

template <class T>
void find_scales(const QuantizeRun &run, const char *in, int64_t blocks, float *absmax,
                 float *inverse) {
  alignas(32) float scales[kBatch] = {};
  for (int64_t i = 0; i < blocks; ++i)
    absmax[i] = scales[i] = block_absmax<T>(in + i * run.blocksize * T::kBytes, run.blocksize);
  constexpr float kSmallestNormal = 0x1p-126f;
  const __m256 divisors = _mm256_max_ps(_mm256_load_ps(scales), _mm256_set1_ps(kSmallestNormal));
  _mm256_store_ps(inverse, _mm256_div_ps(_mm256_set1_ps(1), divisors));
}

template <class T>
void quantize(const QuantizeRun &run) {
  const Encoder encoder(run);
  const char *in = static_cast<const char *>(run.in);
  uint8_t *packed = run.packed;
  alignas(32) float inverse[kBatch];
  for (int64_t first = 0; first < run.blocks; first += kBatch) {
    const int64_t blocks = run.blocks - first < kBatch ? run.blocks - first : kBatch;
    find_scales<T>(run, in, blocks, run.absmax + first, inverse);
    for (int64_t block = 0; block < blocks; ++block) {
      const __m256 factor = _mm256_set1_ps(inverse[block]);
      for (int64_t i = 0; i < run.blocksize; i += kKernelStep) {
        __m256i ranks[4];
        for (int k = 0; k < 4; ++k)
          ranks[k] = encoder.rank(normalise(load<T>(in + 8 * k * T::kBytes), factor));
        _mm_storeu_si128((__m128i *)packed, encoder.pack(ranks[0], ranks[1], ranks[2], ranks[3]));
        in += kKernelStep * T::kBytes;
        packed += kKernelStep / 2;
      }
    }
  }
}

// 8 searches side by side, without branches: their loads overlap.
void encode_scales(const ScaleRun &run) {
  constexpr int kLanes = 8;
  for (int64_t first = 0; first < run.count; first += kLanes) {
    const int64_t lanes = run.count - first < kLanes ? run.count - first : kLanes;
    float x[kLanes] = {};
    for (int64_t lane = 0; lane < lanes; ++lane)
      x[lane] = (run.scales[first + lane] - run.offset) * run.inverse;
    int codes[kLanes] = {};
    for (int step = 128; step > 0; step /= 2)
      for (int lane = 0; lane < kLanes; ++lane)
        codes[lane] += static_cast<int>(x[lane] > run.thresholds[codes[lane] + step]) * step;
    for (int64_t lane = 0; lane < lanes; ++lane)
      run.codes[first + lane] = static_cast<uint8_t>(codes[lane]);
  }
}

}  // namespace

const KernelSet kAvx2Kernels = {
    {dequant<Table32>, dequant<Table16<Fp16>>, dequant<Table16<Bf16>>},
    stream,
    {quantize<Fp32>, quantize<Fp16>, quantize<Bf16>},
    encode_scales,
};

}  // namespace nf4::cpu
