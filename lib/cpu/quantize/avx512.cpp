// Quantize with AVX-512 (F, BW, DQ, VL).
//
// Each weight reads 2 or 4 bytes and writes half a byte. 16 weights take 2 or 3 instructions for
// the scale, 7 for the code (multiply, handle numbers that are not finite, find the cell, look up
// its threshold and codes, compare, choose) and 4 to pack. If thresholds are too close for cells,
// they are searched, which takes 14. One core of a Zen 4 at 3.7 GHz takes 12 ns for 64 weights, or
// 20 ns with the search: these instructions are the bound. Two cores are bound by memory (fp32).
#include "cpu/isa/avx512.hpp"

#include "cpu/quantize/int4_loops.hpp"
#include "cpu/quantize/kernels.hpp"

namespace nf4::cpu {
namespace {

// The largest finite |x|. Taken as integers, magnitudes keep their order, and numbers that are not
// finite come after those that are.
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

// x times inverse; NaN becomes 0, and infinities become 1 and -1.
__m512 normalise(__m512 x, __m512 inverse) {
  // Fixes by class of x: NaN to +0, -infinity to -1, +infinity to +1; other numbers stay.
  const __m512i fixes = _mm512_set1_epi32(0x00a90088);
  return _mm512_fixupimm_ps(_mm512_mul_ps(x, inverse), x, fixes, 0);
}

// Finds codes by looking up the cell of x. A code is in both nibbles of the low byte, so that
// either nibble can be taken; the bits above that byte have no meaning.
struct CellEncoder {
  __m512 low_thresholds, high_thresholds;
  __m512i low_codes, high_codes;

  explicit CellEncoder(const QuantizeArgs &args)
      : low_thresholds(_mm512_loadu_ps(args.cells->thresholds)),
        high_thresholds(_mm512_loadu_ps(args.cells->thresholds + 16)),
        low_codes(_mm512_loadu_si512(args.cells->codes)),
        high_codes(_mm512_loadu_si512(args.cells->codes + 16)) {}

  __m512i encode(__m512 x) const {
    // Beyond 2^23 floats are integers, so the sum's low bits are the cell.
    constexpr float kIntegers = 0x1.8p23f;
    const __m512i cell =
        as_integers(_mm512_fmadd_ps(x, _mm512_set1_ps(Cells::kPerUnit), _mm512_set1_ps(kIntegers)));
    const __m512 threshold = _mm512_permutex2var_ps(low_thresholds, cell, high_thresholds);
    const __m512i codes = _mm512_permutex2var_epi32(low_codes, cell, high_codes);
    const __mmask16 above = _mm512_cmp_ps_mask(x, threshold, _CMP_GT_OQ);
    return _mm512_mask_srli_epi32(codes, above, codes, 8);
  }
};

// The thresholds as a search tree. Each table has the thresholds to compare with after the steps so
// far, indexed by the rank found so far.
struct SearchEncoder {
  __m512 middle, by4, by2, by1;
  __m512i codes;  // in both nibbles

  explicit SearchEncoder(const QuantizeArgs &args) {
    by1 = _mm512_maskz_loadu_ps(0x7fff, args.thresholds);
    by2 = _mm512_permutexvar_ps(_mm512_add_epi32(iota(), _mm512_set1_epi32(1)), by1);
    by4 = _mm512_permutexvar_ps(_mm512_add_epi32(iota(), _mm512_set1_epi32(3)), by1);
    middle = _mm512_set1_ps(args.thresholds[7]);
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)args.codes));
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

// Returns the bytes of 32 codes in two vectors.
__m128i pack(__m512i a, __m512i b) {
  const __m512i words = _mm512_packus_epi32(a, b);
  // Takes the high nibble of the even word and the low nibble of the odd one.
  constexpr int kChoose = 0xca;
  const __m512i bytes = _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xf0), words,
                                                  _mm512_srli_epi32(words, 16), kChoose);
  // Takes two bytes of a and two of b, lane by lane.
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  return _mm_shuffle_epi8(_mm512_cvtepi32_epi8(bytes), order);
}

// The scales of this many blocks are computed before any of the blocks is encoded, so that the
// latencies of one block's scale hide behind the others'.
constexpr int64_t kBatch = 16;

template <class T>
void find_scales(const QuantizeArgs &args, const char *in, int64_t blocks, float *absmax,
                 float *inverse) {
  alignas(64) float scales[kBatch] = {};
  for (int64_t i = 0; i < blocks; ++i)
    scales[i] = block_absmax<T>(in + i * args.blocksize * T::kBytes, args.blocksize);
  for (int64_t i = 0; i < blocks; ++i) absmax[i] = scales[i];
  constexpr float kSmallestNormal = 0x1p-126f;
  const __m512 divisors = _mm512_max_ps(_mm512_load_ps(scales), _mm512_set1_ps(kSmallestNormal));
  _mm512_store_ps(inverse, _mm512_div_ps(_mm512_set1_ps(1), divisors));
}

template <class T, class Encoder>
void quantize_blocks(const Encoder &encoder, const QuantizeArgs &args) {
  const char *in = static_cast<const char *>(args.in);
  uint8_t *packed = args.packed;
  alignas(64) float inverse[kBatch];
  for (int64_t first = 0; first < args.blocks; first += kBatch) {
    const int64_t blocks = args.blocks - first < kBatch ? args.blocks - first : kBatch;
    find_scales<T>(args, in, blocks, args.absmax + first, inverse);
    for (int64_t block = 0; block < blocks; ++block) {
      const __m512 factor = _mm512_set1_ps(inverse[block]);
      for (int64_t i = 0; i < args.blocksize; i += kKernelStep) {
        const __m512i a = encoder.encode(normalise(T::load(in), factor));
        const __m512i b = encoder.encode(normalise(T::load(in + 16 * T::kBytes), factor));
        _mm_storeu_si128((__m128i *)packed, pack(a, b));
        in += kKernelStep * T::kBytes;
        packed += kKernelStep / 2;
      }
    }
  }
}

template <class T>
void quantize(const QuantizeArgs &args) {
  if (args.cells != nullptr)
    quantize_blocks<T>(CellEncoder(args), args);
  else
    quantize_blocks<T>(SearchEncoder(args), args);
}

// The codes of up to 16 scales: the search has four levels in a register of every 16th threshold,
// and four in memory.
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

void encode_scales(const EncodeScalesArgs &args) {
  const ScaleEncoder encoder(args.thresholds);
  const __m512 offset = _mm512_set1_ps(args.offset);
  const __m512 inverse = _mm512_set1_ps(args.inverse);
  for (int64_t i = 0; i < args.count; i += 16) {
    const int64_t left = args.count - i;
    const auto lanes = static_cast<__mmask16>(left < 16 ? (1 << left) - 1 : 0xffff);
    const __m512 scale = _mm512_maskz_loadu_ps(lanes, args.scales + i);
    const __m512 x = _mm512_mul_ps(_mm512_sub_ps(scale, offset), inverse);
    _mm_mask_storeu_epi8(args.codes + i, lanes, encoder.encode(x));
  }
}

// The lowest of 32 signed words.
int lowest_of_words(__m512i x) {
  const __m256i half = _mm256_min_epi16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
  const __m128i quarter =
      _mm_min_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  // The only reduction of words is for unsigned ones.
  const __m128i offset = _mm_set1_epi16(static_cast<short>(0x8000));
  return _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(quarter, offset)), 0) - 0x8000;
}

struct Integers4 {
  using Vector = __m512;
  using Integers = __m512i;
  using Mask = __mmask16;
  static constexpr int kLanes = 16;

  static __m512 zero() { return _mm512_setzero_ps(); }
  static __m512 set(float x) { return _mm512_set1_ps(x); }
  static __m512 load(const float *x) { return _mm512_loadu_ps(x); }
  static void store(float *to, __m512 x) { _mm512_storeu_ps(to, x); }
  static __m512 min(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }
  static __m512 max(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
  static __m512 negative(__m512 x) { return _mm512_xor_ps(x, set(-0.0f)); }
  static __m512 add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
  static __m512 subtract(__m512 a, __m512 b) { return _mm512_sub_ps(a, b); }
  static __m512 multiply(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  static __m512 divide(__m512 a, __m512 b) { return _mm512_div_ps(a, b); }
  static __m512 multiply_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  static __m512 multiply_subtract(__m512 a, __m512 b, __m512 from) {
    return _mm512_fnmadd_ps(a, b, from);
  }
  static __m512 nearest(__m512 x) { return _mm512_roundscale_ps(x, kNearest); }
  static float lowest(__m512 x) { return _mm512_reduce_min_ps(x); }
  static float highest(__m512 x) { return _mm512_reduce_max_ps(x); }
  static Mask all() { return 0xffff; }
  static bool is_all(Mask mask) { return mask == 0xffff; }
  static Mask is_finite(__m512 x) {
    return _mm512_cmp_ps_mask(_mm512_abs_ps(x), set(__builtin_inff()), _CMP_LT_OQ);
  }
  static __m512 where(Mask mask, __m512 x) { return _mm512_maskz_mov_ps(mask, x); }
  static __m512 replace_nan(__m512 x, __m512 of, __m512 by) {
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(of, of, _CMP_UNORD_Q), by);
  }
  static __m512i to_integers(__m512 x) { return _mm512_cvtps_epi32(x); }
  static __m512i add_integers(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
  // Rounds to the nearest 16-bit number, within the positive finite ones.
  static __m512 round_scale(__m512 x, bool fp16, uint16_t *bits) {
    const __m512i float_bits = as_integers(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(float_bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(_mm512_add_epi32(float_bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m256i nearest =
        fp16 ? _mm512_cvtps_ph(x, kNearest) : _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
    const __m256i within = _mm256_min_epu16(_mm256_max_epu16(nearest, _mm256_set1_epi16(1)),
                                            _mm256_set1_epi16(fp16 ? 0x7bff : 0x7f7f));
    _mm256_storeu_si256((__m256i *)bits, within);
    return fp16 ? Fp16::widen(within) : Bf16::widen(within);
  }
  static void pack(const __m512i (&codes)[2], uint8_t *out) {
    const __m512i words = _mm512_packus_epi32(codes[0], codes[1]);
    const __m512i bytes = _mm512_madd_epi16(words, _mm512_set1_epi32(0x00100001));
    // Takes two bytes of either, lane by lane.
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    _mm_storeu_si128((__m128i *)out, _mm_shuffle_epi8(_mm512_cvtepi32_epi8(bytes), order));
  }
  static constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
};

// Compares as integers, 32 at a time. If all bits but the sign of negative numbers are inverted,
// integers have the order of the numbers.
template <class From>
bool int4_range_of_16_bits(const void *in, int64_t elements, float *low, float *high) {
  const char *from = static_cast<const char *>(in);
  const __m512i magnitude = _mm512_set1_epi16(0x7fff),
                infinity = _mm512_set1_epi16(From::kInfinity);
  __m512i lows = _mm512_setzero_si512(), highs = lows;
  __mmask32 all = ~__mmask32{0};
  for (int64_t i = 0; i < elements; i += 32, from += 64) {
    const __m512i x = _mm512_loadu_si512(from);
    const __mmask32 finite = _mm512_cmplt_epu16_mask(_mm512_and_si512(x, magnitude), infinity);
    const __m512i key = _mm512_xor_si512(x, _mm512_and_si512(_mm512_srai_epi16(x, 15), magnitude));
    lows = _mm512_mask_min_epi16(lows, finite, lows, key);
    highs = _mm512_mask_max_epi16(highs, finite, highs, key);
    all &= finite;
  }
  const auto number = [](int key) {
    const uint16_t bits = static_cast<uint16_t>(key < 0 ? key ^ 0x7fff : key);
    return _mm512_cvtss_f32(From::widen(_mm256_set1_epi16(static_cast<short>(bits)))) + 0.0f;
  };
  *low = number(lowest_of_words(lows));
  *high = number(-1 - lowest_of_words(_mm512_ternarylogic_epi32(highs, highs, highs, 0x55)));
  return all == ~__mmask32{0};
}

}  // namespace

const QuantizeKernels kAvx512Quantize = {
    {quantize<Fp32>, quantize<Fp16>, quantize<Bf16>},
    encode_scales,
    {int4_range<Integers4, Fp32>, int4_range_of_16_bits<Fp16>, int4_range_of_16_bits<Bf16>},
    int4_scales<Integers4>,
    {int4_codes<Integers4, Fp32>, int4_codes<Integers4, Fp16>, int4_codes<Integers4, Bf16>},
};

}  // namespace nf4::cpu
