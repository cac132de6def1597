// Quantize with AVX2 (and F16C).
//
// 8 weights take about 8 instructions to scale and to handle numbers that are not finite, 14 to
// search and 3 to pack. These instructions are the bound: 64 weights take 27.5 ns on a Zen 4 at 3.7
// GHz. It has no cells (kernels.hpp): their tables of 32 entries would fill four registers.
#include "cpu/isa/avx2.hpp"

#include "cpu/quantize/int4_loops.hpp"
#include "cpu/quantize/kernels.hpp"
#include "cpu/quantize/scale_loops.hpp"

namespace nf4::cpu {
namespace {

__m256i load_bits(const char *in) { return _mm256_loadu_si256((const __m256i *)in); }

// The largest finite |x|. Taken as integers, magnitudes keep their order, and numbers that are not
// finite come after those that are.
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
  // The only reduction of words is a minimum.
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

// x times inverse; NaN becomes 0, and infinities become 1 and -1.
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

  explicit Encoder(const QuantizeArgs &args) {
    const float *t = args.thresholds;
    middle = _mm256_set1_ps(t[7]);
    by4 = _mm256_setr_ps(t[3], t[11], 0, 0, 0, 0, 0, 0);
    by2 = _mm256_setr_ps(t[1], t[5], t[9], t[13], 0, 0, 0, 0);
    by1 = _mm256_setr_ps(t[0], t[2], t[4], t[6], t[8], t[10], t[12], t[14]);
    codes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)args.codes));
  }

  // Returns the number of thresholds below x.
  __m256i rank(__m256 x) const {
    const auto descend = [&](__m256i node, __m256 table) {
      const __m256 threshold = _mm256_permutevar8x32_ps(table, node);
      const __m256i above = _mm256_castps_si256(_mm256_cmp_ps(x, threshold, _CMP_GT_OQ));
      return _mm256_sub_epi32(_mm256_add_epi32(node, node), above);
    };
    const __m256i upper = _mm256_castps_si256(_mm256_cmp_ps(x, middle, _CMP_GT_OQ));
    return descend(descend(descend(_mm256_srli_epi32(upper, 31), by4), by2), by1);
  }

  // Returns the bytes of 32 ranks.
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

// The scales of this many blocks are computed before any of the blocks is encoded, so that the
// latencies of one block's scale hide behind the others'.
constexpr int64_t kBatch = 8;

template <class T>
void find_scales(const QuantizeArgs &args, const char *in, int64_t blocks, float *absmax,
                 float *inverse) {
  alignas(32) float scales[kBatch] = {};
  for (int64_t i = 0; i < blocks; ++i)
    absmax[i] = scales[i] = block_absmax<T>(in + i * args.blocksize * T::kBytes, args.blocksize);
  constexpr float kSmallestNormal = 0x1p-126f;
  const __m256 divisors = _mm256_max_ps(_mm256_load_ps(scales), _mm256_set1_ps(kSmallestNormal));
  _mm256_store_ps(inverse, _mm256_div_ps(_mm256_set1_ps(1), divisors));
}

template <class T>
void quantize(const QuantizeArgs &args) {
  const Encoder encoder(args);
  const char *in = static_cast<const char *>(args.in);
  uint8_t *packed = args.packed;
  alignas(32) float inverse[kBatch];
  for (int64_t first = 0; first < args.blocks; first += kBatch) {
    const int64_t blocks = args.blocks - first < kBatch ? args.blocks - first : kBatch;
    find_scales<T>(args, in, blocks, args.absmax + first, inverse);
    for (int64_t block = 0; block < blocks; ++block) {
      const __m256 factor = _mm256_set1_ps(inverse[block]);
      for (int64_t i = 0; i < args.blocksize; i += kKernelStep) {
        __m256i ranks[4];
        for (int k = 0; k < 4; ++k)
          ranks[k] = encoder.rank(normalise(T::load(in + 8 * k * T::kBytes), factor));
        _mm_storeu_si128((__m128i *)packed, encoder.pack(ranks[0], ranks[1], ranks[2], ranks[3]));
        in += kKernelStep * T::kBytes;
        packed += kKernelStep / 2;
      }
    }
  }
}

struct Integers4 {
  using Vector = __m256;
  using Integers = __m256i;
  using Mask = __m256i;
  static constexpr int kLanes = 8;

  static __m256 zero() { return _mm256_setzero_ps(); }
  static __m256 set(float x) { return _mm256_set1_ps(x); }
  static __m256 load(const float *x) { return _mm256_loadu_ps(x); }
  static void store(float *to, __m256 x) { _mm256_storeu_ps(to, x); }
  static __m256 min(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }
  static __m256 max(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
  static __m256 negative(__m256 x) { return _mm256_xor_ps(x, set(-0.0f)); }
  static __m256 add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
  static __m256 subtract(__m256 a, __m256 b) { return _mm256_sub_ps(a, b); }
  static __m256 multiply(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
  static __m256 divide(__m256 a, __m256 b) { return _mm256_div_ps(a, b); }
  static __m256 multiply_add(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
  static __m256 multiply_subtract(__m256 a, __m256 b, __m256 from) {
    return _mm256_fnmadd_ps(a, b, from);
  }
  static __m256 nearest(__m256 x) { return _mm256_round_ps(x, kNearest); }
  static float lowest(__m256 x) {
    __m128 half = _mm_min_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_min_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_min_ss(half, _mm_movehdup_ps(half)));
  }
  static float highest(__m256 x) { return -lowest(negative(x)); }
  static Mask all() { return _mm256_set1_epi32(-1); }
  static bool is_all(Mask mask) { return _mm256_movemask_epi8(mask) == -1; }
  static Mask is_finite(__m256 x) {
    const __m256 magnitude = _mm256_andnot_ps(set(-0.0f), x);
    return _mm256_castps_si256(_mm256_cmp_ps(magnitude, set(__builtin_inff()), _CMP_LT_OQ));
  }
  static __m256 where(Mask mask, __m256 x) { return _mm256_and_ps(x, _mm256_castsi256_ps(mask)); }
  static __m256 replace_nan(__m256 x, __m256 of, __m256 by) {
    return _mm256_blendv_ps(x, by, _mm256_cmp_ps(of, of, _CMP_UNORD_Q));
  }
  static __m256i to_integers(__m256 x) { return _mm256_cvtps_epi32(x); }
  static __m256i add_integers(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
  // Rounds to the nearest 16-bit number, within the positive finite ones.
  static __m256 round_scale(__m256 x, bool fp16, uint16_t *bits) {
    const __m256i float_bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(float_bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_add_epi32(float_bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m128i nearest = fp16 ? _mm256_cvtps_ph(x, kNearest)
                                 : _mm_packus_epi32(_mm256_castsi256_si128(rounded),
                                                    _mm256_extracti128_si256(rounded, 1));
    const __m128i within = _mm_min_epu16(_mm_max_epu16(nearest, _mm_set1_epi16(1)),
                                         _mm_set1_epi16(fp16 ? 0x7bff : 0x7f7f));
    _mm_storeu_si128((__m128i *)bits, within);
    return fp16 ? Fp16::widen(within) : Bf16::widen(within);
  }
  static void pack(const __m256i (&codes)[4], uint8_t *out) {
    // The order in each lane: 0 4 8 12, 16 20 24 28 of each half, in dwords of 4 codes.
    const __m256i words = _mm256_packus_epi16(_mm256_packus_epi32(codes[0], codes[1]),
                                              _mm256_packus_epi32(codes[2], codes[3]));
    const __m256i bytes =
        _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));
    const __m256i nibbles = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(nibbles));
  }
  static constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
};

}  // namespace

const QuantizeKernels kAvx2Quantize = {
    {quantize<Fp32>, quantize<Fp16>, quantize<Bf16>},
    encode_scales<Integers4>,
    {int4_range<Integers4, Fp32>, int4_range<Integers4, Fp16>, int4_range<Integers4, Bf16>},
    int4_scales<Integers4>,
    {int4_codes<Integers4, Fp32>, int4_codes<Integers4, Fp16>, int4_codes<Integers4, Bf16>},
};

}  // namespace nf4::cpu
