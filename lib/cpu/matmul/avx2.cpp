// Matmul with AVX2 in fp32 (with FMA and F16C).
//
// Dot: vpshufb looks up 32 codes in a table of bytes, and the bytes of a number are put together.
// Numbers of bf16, in two tables, take 19 instructions for 64 weights; numbers of fp32, in four,
// take 27. In addition there are 8 fma and one for the scale for each row of x. Words of integers
// need no look-up: a code becomes a number in the mantissa of 2^23. Tile: 12 fma, two a cycle, for
// 7 loads; it has 16 registers. split_loops.hpp and pair_loops.hpp multiply x in bf16 in integers.
#include "cpu/isa/avx2.hpp"

#include <type_traits>

#include "cpu/matmul/column_loops.hpp"
#include "cpu/matmul/loops.hpp"
#include "cpu/matmul/outer_loops.hpp"
#include "cpu/matmul/pair_loops.hpp"
#include "cpu/matmul/scattered_loops.hpp"
#include "cpu/matmul/split_loops.hpp"
#include "nf4/nf4.h"

namespace nf4::cpu {
namespace {

struct Floats : Int4Lanes {
  using Item = float;
  using Operand = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kTileM = 3;
  static constexpr int kOuterVectors[] = {8, 4, 4, 2, 2, 2};
  static constexpr int kColumnM = 4;
  static constexpr int kColumnRegisters = 12;

  static __m256 load(const float *x) { return _mm256_loadu_ps(x); }
  static __m256 one() { return _mm256_set1_ps(1); }
  static void store(float *to, __m256 x) { _mm256_storeu_ps(to, x); }
  static __m256 multiply(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
  static __m256 multiply_add(__m256 a, __m256 b, __m256 sum) { return _mm256_fmadd_ps(a, b, sum); }
  static __m256 scale_add(__m256 a, __m256 b, __m256 sum) { return _mm256_fmadd_ps(a, b, sum); }
  static float sum_of(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
  }
  // Reduces four vectors to four floats.
  static void add_sums(__m256 a, __m256 b, __m256 c, __m256 d, float *to) {
    const __m256 by_lane = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    const __m128 sums =
        _mm_add_ps(_mm256_castps256_ps128(by_lane), _mm256_extractf128_ps(by_lane, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), sums));
  }

  // The words are of integer weights, so the number of a code is the code minus 8. A code in the
  // mantissa of 2^23 is 2^23 + code.
  static __m256 load_table(const void *) { return _mm256_set1_ps(0x1p23f + 8); }
  static __m256i load_codes(const uint8_t *packed) {
    return _mm256_loadu_si256((const __m256i *)packed);
  }
  static __m256 look_up(__m256 zero, __m256i codes) {
    const __m256i mantissa = _mm256_and_si256(codes, _mm256_set1_epi32(15));
    const __m256 number = _mm256_or_ps(_mm256_castsi256_ps(mantissa), _mm256_set1_ps(0x1p23f));
    return _mm256_sub_ps(number, zero);
  }
  static __m256i next(__m256i codes) { return _mm256_srli_epi32(codes, 4); }

  static __m256 load_some(const float *x, int64_t) { return load(x); }
  static __m256 broadcast(const float *x) { return _mm256_broadcast_ss(x); }
  static __m256i half_words(const __m256i (&words)[1], int half) {
    return half == 0 ? words[0] : _mm256_srli_epi32(words[0], 16);
  }
};

// Operands of rows of codes. A unit is 32 bytes. The lower half of a vector has elements of its
// first 16 bytes, and the upper half those of the others; a blocksize of 32 has a scale for each.
struct Rows : Floats {
  static constexpr int kVectors = 8;
  static constexpr int kUnit = kLanes * kVectors;

  // The codes of a unit, and the number of the vector that is looked up next.
  struct Codes {
    __m256i packed;
    int vector;

    // A nibble of each byte: the low nibbles belong to the first four vectors.
    __m256i nibbles() const {
      const __m256i low = vector < kVectors / 2 ? packed : _mm256_srli_epi32(packed, 4);
      return _mm256_and_si256(low, _mm256_set1_epi8(15));
    }
  };
  static Codes load_codes(const uint8_t *packed) {
    return {_mm256_loadu_si256((const __m256i *)packed), 0};
  }
  static Codes next(const Codes &codes) { return {codes.packed, codes.vector + 1}; }

  // A unit has one scale, or one for each half. Returns the index of the second.
  static int load_spread(int scales) { return scales - 1; }
  static __m256 spread_scales(const float *scales, int second) {
    return _mm256_blend_ps(broadcast(scales), broadcast(scales + second), 0xf0);
  }

  // The lower or the upper halves of two vectors.
  template <int kHalf>
  static __m256 halves(__m256 a, __m256 b) {
    return _mm256_permute2f128_ps(a, b, kHalf == 0 ? 0x20 : 0x31);
  }

  // Vector j has the nibbles of bytes 4 j to 4 j + 3 of each half.
  struct Order {
    static constexpr int kHighNibble = 4;
    static void sort(__m256 (&x)[kVectors]) {
      __m256 low[4], high[4];
      NF4_UNROLL
      for (int j = 0; j < 4; ++j) {
        const __m256 first = halves<0>(x[j], x[j + 4]), second = halves<1>(x[j], x[j + 4]);
        low[j] = _mm256_shuffle_ps(first, second, 0x88);
        high[j] = _mm256_shuffle_ps(first, second, 0xdd);
      }
      NF4_UNROLL
      for (int j = 0; j < 4; ++j) {
        x[j] = low[j];
        x[j + 4] = high[j];
      }
    }
  };

  static __m256i unpack_bytes(bool upper, __m256i a, __m256i b) {
    return upper ? _mm256_unpackhi_epi8(a, b) : _mm256_unpacklo_epi8(a, b);
  }
};

// The codebook is in fp32.
struct Fp32Rows : Rows {
  static constexpr int kDotN[] = {2, 2, 2, 2};
  struct Table {
    __m256i bytes[4];
  };
  // Each lane of the table gets a byte of all 16 numbers.
  static Table load_table(const void *codebook) {
    const __m128i by_byte = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m128i words[4];
    NF4_UNROLL
    for (int i = 0; i < 4; ++i)
      words[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)codebook + i), by_byte);
    const __m128i low = _mm_unpacklo_epi32(words[0], words[1]);
    const __m128i high = _mm_unpackhi_epi32(words[0], words[1]);
    const __m128i next_low = _mm_unpacklo_epi32(words[2], words[3]);
    const __m128i next_high = _mm_unpackhi_epi32(words[2], words[3]);
    return {_mm256_broadcastsi128_si256(_mm_unpacklo_epi64(low, next_low)),
            _mm256_broadcastsi128_si256(_mm_unpackhi_epi64(low, next_low)),
            _mm256_broadcastsi128_si256(_mm_unpacklo_epi64(high, next_high)),
            _mm256_broadcastsi128_si256(_mm_unpackhi_epi64(high, next_high))};
  }
  static __m256 look_up(const Table &table, const Codes &codes) {
    const __m256i nibbles = codes.nibbles();
    __m256i bytes[4];
    NF4_UNROLL
    for (int i = 0; i < 4; ++i) bytes[i] = _mm256_shuffle_epi8(table.bytes[i], nibbles);
    const bool upper = (codes.vector & 2) != 0;
    const __m256i low = unpack_bytes(upper, bytes[0], bytes[1]);
    const __m256i high = unpack_bytes(upper, bytes[2], bytes[3]);
    return _mm256_castsi256_ps((codes.vector & 1) != 0 ? _mm256_unpackhi_epi16(low, high)
                                                       : _mm256_unpacklo_epi16(low, high));
  }
};

// The codebook is in bf16, whose numbers are the upper halves of numbers of fp32.
struct Bf16Rows : Rows {
  static constexpr int kDotN[] = {4, 2, 1, 1};
  struct Table {
    __m256i low, high;
  };
  static Table load_table(const void *codebook) {
    const __m128i by_byte = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    const __m128i first = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)codebook), by_byte);
    const __m128i second =
        _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)codebook + 1), by_byte);
    return {_mm256_broadcastsi128_si256(_mm_unpacklo_epi64(first, second)),
            _mm256_broadcastsi128_si256(_mm_unpackhi_epi64(first, second))};
  }
  // The numbers of an even vector and of the next one: each half has half of either.
  static __m256i look_up_pair(const Table &table, const Codes &codes) {
    const __m256i nibbles = codes.nibbles();
    return unpack_bytes((codes.vector & 2) != 0, _mm256_shuffle_epi8(table.low, nibbles),
                        _mm256_shuffle_epi8(table.high, nibbles));
  }
  static __m256 look_up(const Table &table, const Codes &codes) {
    const __m256i zero = _mm256_setzero_si256(), pair = look_up_pair(table, codes);
    return _mm256_castsi256_ps((codes.vector & 1) != 0 ? _mm256_unpackhi_epi16(zero, pair)
                                                       : _mm256_unpacklo_epi16(zero, pair));
  }
  // All numbers of a unit.
  static void look_up_pairs(const Table &table, const uint8_t *packed, __m256i (&entries)[4]) {
    const __m256i codes = _mm256_loadu_si256((const __m256i *)packed);
    NF4_UNROLL
    for (int j = 0; j < 4; ++j) entries[j] = look_up_pair(table, {codes, 2 * j});
  }
};

template <class T, bool kZeros>
void decode_rows(const DecodeArgs &args) {
  const auto table = T::load_table(args.codebook);
  const auto spread = T::load_spread(args.scales_per_unit);
  for (int64_t n = 0; n < args.n; ++n) {
    const uint8_t *packed = args.packed + n * args.row_bytes;
    int64_t at = n * args.scale_stride;
    float *out = args.out + n * args.out_stride;
    for (const float *end = out + args.elements; out < end; packed += T::kUnit / 2) {
      const __m256 scale = T::spread_scales(args.scales + at, spread);
      const __m256 zero = kZeros ? T::spread_scales(args.zeros + at, spread) : T::zero();
      auto codes = T::load_codes(packed);
      NF4_UNROLL
      for (int j = 0; j < T::kVectors; ++j, out += T::kLanes) {
        const __m256 entry = T::look_up(table, codes);
        codes = T::next(codes);
        T::store(out, T::multiply(kZeros ? _mm256_add_ps(entry, zero) : entry, scale));
      }
      at += args.scales_per_unit;
    }
  }
}

template <class T>
void decode(const DecodeArgs &args) {
  if (args.zeros == nullptr) return decode_rows<T, false>(args);
  decode_rows<T, true>(args);
}

void transpose_x(const float *x, int64_t x_stride, int64_t elements, float *out,
                 int64_t out_stride) {
  static_assert(kTransposedM == Floats::kLanes, "a vector each way");
  for (int64_t i = 0; i < elements; i += Floats::kLanes, out += Floats::kLanes * out_stride) {
    __m256 rows[kTransposedM];
    NF4_UNROLL
    for (int j = 0; j < kTransposedM; ++j) rows[j] = Floats::load(x + j * x_stride + i);
    transpose(rows);
    NF4_UNROLL
    for (int j = 0; j < kTransposedM; ++j) Floats::store(out + j * out_stride, rows[j]);
  }
}

// Computes the scales of a nested block, 8 at a time. The last 8 overlap with those before.
void nested_scales(const uint8_t *codes, int64_t count, const float *table, float absmax,
                   float offset, float *out) {
  const auto scales = [=](__m128i some) {
    const __m256 entries = _mm256_i32gather_ps(table, _mm256_cvtepu8_epi32(some), sizeof *table);
    return _mm256_add_ps(_mm256_mul_ps(entries, _mm256_set1_ps(absmax)), _mm256_set1_ps(offset));
  };
  if (count < 8) {
    uint64_t some = 0;
    for (int64_t i = count; i-- > 0;) some = some << 8 | codes[i];
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lanes);
    return _mm256_maskstore_ps(out, mask, scales(_mm_cvtsi64_si128(static_cast<int64_t>(some))));
  }
  for (int64_t i = 0; i < count; i += 8) {
    const int64_t at = i + 8 <= count ? i : count - 8;
    _mm256_storeu_ps(out + at, scales(_mm_loadl_epi64((const __m128i *)(codes + at))));
  }
}

template <class T, bool kHighFirst>
constexpr DotKernels kDot = {
    std::is_same_v<T, Bf16Rows> ? NF4_DTYPE_BF16 : NF4_DTYPE_FP32,
    {prepare_units<T, Fp32, kHighFirst>, prepare_units<T, Fp16, kHighFirst>,
     prepare_units<T, Bf16, kHighFirst>},
    dot<T>,
    kHighFirst ? nullptr : dot<T, true>,
    decode<T>};

template <bool kHighFirst>
constexpr DotKernels with_split() {
  DotKernels kernels = kDot<Bf16Rows, kHighFirst>;
  kernels.split_x = split_x<Bf16Rows, kHighFirst>;
  kernels.dot_split = dot_split<Bf16Rows, false>;
  if (!kHighFirst) {
    kernels.dot_split_zeros = dot_split<Bf16Rows, true>;
    kernels.decode_gptq_pairs = decode_gptq_pairs;
    kernels.decode_awq_pairs = decode_awq_pairs;
  }
  kernels.split_pairs = split_pairs;
  kernels.decode_pairs = decode_pairs<Bf16Rows, kHighFirst>;
  kernels.multiply_pairs = multiply_pairs;
  return kernels;
}

// The kernels for one dtype of x differ in the codebook of dot alone. The integers of int4 are
// exact in bf16.
constexpr MatmulKernels kernels(const DotKernels &codebook_dot, const DotKernels &int4_dot) {
  static_assert(Rows::kUnit == 64, "transposed.cpp");
  return {
      NF4_DTYPE_FP32,
      Rows::kUnit,
      Floats::kTileM,
      1024,
      12,
      4,
      Floats::kSumLanes,
      Floats::kSumLanes,
      codebook_dot,
      int4_dot,
      x_sums<Rows>,
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
      transpose_x,
      nullptr,
      nullptr,
      nullptr,
      nested_scales,
  };
}

}  // namespace

const MatmulKernels kAvx2Matmul = kernels(kDot<Fp32Rows, true>, kDot<Bf16Rows, false>);
const MatmulKernels kAvx2MatmulOfBf16 = kernels(with_split<true>(), with_split<false>());

}  // namespace nf4::cpu
