// Makes pairs of integers of rows of x in bf16, with AVX2, for pair_loops.hpp.
//
// 64 numbers of x share a power of two as their scale, with which the largest takes 15 bits. Each
// number of bf16 has 8 bits, so what is at least 1/128 of the largest is an integer. Others, 1 % of
// normal numbers, leave a rest, which is multiplied in fp32. Sums of products of integers are
// exact.
#pragma once

#include <immintrin.h>

#include "cpu/isa/avx2.hpp"
#include "cpu/matmul/kernels.hpp"

namespace nf4::cpu {
namespace {

constexpr int kExponentBias = 127, kInfiniteExponent = 255;
// With a larger number, scales times the unit of a codebook are normal.
constexpr int kLeastExponent = 48;
constexpr int kPairBits = 15;  // of the largest number, without the sign
constexpr int kNumberBits = 8;

inline float power_of_two(int exponent) {
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((exponent + kExponentBias) << 23)));
}

inline float bf16_number(uint16_t x) {
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(x << 16)));
}

inline int biased_exponent(uint16_t x) { return x >> (kNumberBits - 1) & 0xff; }

// The biased exponent of the largest of 64 numbers.
inline int largest_exponent(const __m256i (&x)[4]) {
  const __m256i magnitude = _mm256_set1_epi16(0x7fff);
  __m256i largest = _mm256_and_si256(x[0], magnitude);
  NF4_UNROLL
  for (int i = 1; i < 4; ++i)
    largest = _mm256_max_epu16(largest, _mm256_and_si256(x[i], magnitude));
  const __m128i half =
      _mm_max_epu16(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  // vphminposuw finds the least one.
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)));
  return biased_exponent(static_cast<uint16_t>(~_mm_cvtsi128_si32(least)));
}

inline int sum_of_lanes(__m256i x) {
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

inline int place_of(const PairOrder &order, int column) {
  return column / 8 * 8 + order.places[column % 8];
}

// The bytes of 8 columns of 16 bits, in order.
inline __m256i shuffle_of(const PairOrder &order) {
  alignas(16) uint8_t bytes[16];
  for (int i = 0; i < 8; ++i) {
    bytes[2 * i] = static_cast<uint8_t>(2 * order.columns[i]);
    bytes[2 * i + 1] = static_cast<uint8_t>(2 * order.columns[i] + 1);
  }
  return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)bytes));
}

// Adds a rest times the unit of the codebook, and returns false if that is not exact. An infinite
// product of a finite x would be NaN with an entry of 0.
inline bool add_rest(const SplitPairsArgs &args, int place, float x, int &count) {
  constexpr float kLeast = 0x1p-100f;
  const float product = x * args.unit;
  args.rests[count++] = {product, static_cast<int16_t>(args.first_place + place), args.m};
  const bool overflows = __builtin_isinf(product) && !__builtin_isinf(x);
  return !(__builtin_fabsf(product) < kLeast) && !overflows;
}

// The integers of 64 numbers, in units of 2^exponent, in the order of pairs.
struct PairIntegers {
  __m256i in_order[4];
  __m256i sum;          // of magnitudes
  uint32_t inexact[2];  // a bit for each number: eight of the first 16, of the next 16, and so on

  PairIntegers(const __m256i (&x)[4], int exponent, __m256i order) {
    const __m256 unit = _mm256_set1_ps(power_of_two(exponent));
    const __m256 inverse = _mm256_set1_ps(power_of_two(-exponent));
    const __m256i zero = _mm256_setzero_si256();
    __m256i differs[4];
    sum = zero;
    NF4_UNROLL
    for (int i = 0; i < 4; ++i) {
      // Numbers of fp32, in an order that packing restores.
      const __m256i wide[2] = {_mm256_unpacklo_epi16(zero, x[i]),
                               _mm256_unpackhi_epi16(zero, x[i])};
      __m256i integers[2], differ[2];
      NF4_UNROLL
      for (int j = 0; j < 2; ++j) {
        const __m256 number = _mm256_castsi256_ps(wide[j]);
        integers[j] = _mm256_cvtps_epi32(_mm256_mul_ps(number, inverse));
        // Compared with x itself: number * inverse may underflow to 0.
        const __m256 back = _mm256_mul_ps(_mm256_cvtepi32_ps(integers[j]), unit);
        differ[j] = _mm256_castps_si256(_mm256_cmp_ps(number, back, _CMP_NEQ_UQ));
      }
      differs[i] = _mm256_packs_epi32(differ[0], differ[1]);
      const __m256i packed = _mm256_packs_epi32(integers[0], integers[1]);
      sum =
          _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_abs_epi16(packed), _mm256_set1_epi16(1)));
      in_order[i] = _mm256_shuffle_epi8(packed, order);
    }
    NF4_UNROLL
    for (int i = 0; i < 2; ++i)
      inexact[i] = static_cast<uint32_t>(
          _mm256_movemask_epi8(_mm256_packs_epi16(differs[2 * i], differs[2 * i + 1])));
  }

  int rests() const { return __builtin_popcount(inexact[0]) + __builtin_popcount(inexact[1]); }
};

// The largest exponent of the numbers that are worth being integers of kBits bits, when infinity,
// NaN or much larger numbers stand among them.
template <int kBits>
int most_frequent_exponent(const uint16_t *x) {
  int counts[kInfiniteExponent + 1] = {}, best = kLeastExponent, most = 0, in_window = 0;
  for (int i = 0; i < kPairUnit; ++i) ++counts[biased_exponent(x[i])];
  for (int e = 1; e < kInfiniteExponent; ++e) {
    in_window += counts[e];
    if (e > kBits - kNumberBits + 1) in_window -= counts[e - (kBits - kNumberBits + 1)];
    if (e < kLeastExponent || in_window <= most) continue;
    best = e;
    most = in_window;
  }
  return best;
}

// Splits numbers of very different magnitudes: what is not an integer is a rest as a whole.
inline int split_some(const SplitPairsArgs &args) {
  constexpr int kBits = kPairBits - 2;  // so that magnitudes do not exceed the sum allowed
  const int top = most_frequent_exponent<kBits>(args.x);
  const int exponent = top - kExponentBias - (kBits - 1);
  const float scale = power_of_two(exponent), inverse = power_of_two(-exponent);
  int count = 0;
  bool fits = true;
  for (int i = 0; i < kPairUnit; ++i) {
    const float x = bf16_number(args.x[i]);
    const int e = biased_exponent(args.x[i]);
    const int integer = e <= top && e + kBits > top ? static_cast<int>(x * inverse) : 0;
    const bool exact = static_cast<float>(integer) * scale == x;
    const int place = place_of(args.order, i);
    args.out[place] = static_cast<int16_t>(exact ? integer : 0);
    if (!exact) fits &= add_rest(args, place, x, count);
  }
  *args.scale = scale * args.unit;
  return fits ? count : -1;
}

inline int split_pairs(const SplitPairsArgs &args) {
  constexpr int kManyRests = 8;
  __m256i x[4];
  NF4_UNROLL
  for (int i = 0; i < 4; ++i) x[i] = _mm256_loadu_si256((const __m256i *)args.x + i);
  const int largest = largest_exponent(x);
  int exponent =
      (largest < kLeastExponent ? kLeastExponent : largest) - kExponentBias - (kPairBits - 1);
  const __m256i order = shuffle_of(args.order);
  PairIntegers integers(x, exponent, order);
  while (sum_of_lanes(integers.sum) > args.most) integers = PairIntegers(x, ++exponent, order);
  if (largest == kInfiniteExponent || integers.rests() > kManyRests) return split_some(args);
  const float scale = power_of_two(exponent);
  *args.scale = scale * args.unit;
  NF4_UNROLL
  for (int i = 0; i < 4; ++i) _mm256_store_si256((__m256i *)args.out + i, integers.in_order[i]);
  int count = 0;
  bool fits = true;
  for (int i = 0; i < 2; ++i) {
    for (uint32_t left = integers.inexact[i]; left != 0; left &= left - 1) {
      const int bit = __builtin_ctz(left);
      const int column = i * 32 + bit / 8 % 2 * 16 + bit / 16 * 8 + bit % 8;
      const int place = place_of(args.order, column);
      fits &= add_rest(args, place, bf16_number(args.x[column]) - scale * args.out[place], count);
    }
  }
  return fits ? count : -1;
}

}  // namespace
}  // namespace nf4::cpu
