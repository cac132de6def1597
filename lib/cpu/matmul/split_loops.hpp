// Dot for one row of x in bf16, in integers, with AVX2: vpmaddwd multiplies 16 entries of the
// codebook and 16 numbers of x. In fp32 that takes two fma, and two shuffles that make floats of
// the entries.
//
// A number of bf16 has 8 bits. Eight numbers share a scale, with which the largest takes 15 bits.
// A number is an integer unless it is less than 1/128 of the largest, and `low` has what is missing
// of such numbers; of the units of normal numbers, 28 % have any. All products, and the sums of 8,
// are exact.
#pragma once

#include <immintrin.h>

#include "cpu/isa/avx2.hpp"
#include "cpu/matmul/kernels.hpp"
#include "cpu/matmul/loops.hpp"

namespace nf4::cpu {
namespace {

// ---- Splitting x ---------------------------------------------------------------------

// The bits of an integer, without the sign, and the float that a 1 of `low` stands for.
constexpr int kSplitBits = 15;
constexpr float kLowUnit = 0x1p-15f;

inline __m256i exponent_bits(uint32_t exponent) {
  return _mm256_set1_epi32(static_cast<int>(exponent << 23));
}

// The scale of each lane of 32 bits, a power of two, and its inverse for prepared x: a lane has two
// numbers of each even vector, or of each odd one. Lanes of very small numbers have a larger scale
// than they need, and so has a lane with infinity or NaN; either leaves a rest.
struct LaneScales {
  __m256 scale, inverse[2];

  explicit LaneScales(const __m256 (&x)[8]) {
    constexpr int kLeast = 48, kBias = 127;
    __m256i largest[2];
    NF4_UNROLL
    for (int j = 0; j < 8; ++j) {
      const __m256i exponents = _mm256_and_si256(_mm256_castps_si256(x[j]), exponent_bits(0xff));
      largest[j % 2] = _mm256_max_epi32(j < 2 ? exponent_bits(kLeast) : largest[j % 2], exponents);
    }
    const __m256 even = _mm256_castsi256_ps(largest[0]), odd = _mm256_castsi256_ps(largest[1]);
    const __m256i of_lanes =
        _mm256_max_epi32(_mm256_castps_si256(_mm256_shuffle_ps(even, odd, 0x88)),
                         _mm256_castps_si256(_mm256_shuffle_ps(even, odd, 0xdd)));
    scale = _mm256_castsi256_ps(_mm256_sub_epi32(of_lanes, exponent_bits(kSplitBits - 1)));
    const __m256 inverses =
        _mm256_castsi256_ps(_mm256_sub_epi32(exponent_bits(2 * kBias + kSplitBits - 1), of_lanes));
    inverse[0] = _mm256_unpacklo_ps(inverses, inverses);
    inverse[1] = _mm256_unpackhi_ps(inverses, inverses);
  }
};

// Nonzero where x is not 0, but its product with a scale is.
inline __m256 underflows(__m256 x, __m256 product) {
  return _mm256_and_ps(x, _mm256_cmp_ps(product, _mm256_setzero_ps(), _CMP_EQ_OQ));
}

// Rounds x to integers, and returns what is left of x, which is exact.
inline __m256 split_off(__m256 x, __m256 &integers) {
  const __m256 rounded = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  integers = rounded;
  return _mm256_sub_ps(x, rounded);
}

inline bool any_nonzero(__m256 x) {
  return _mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_UQ)) != 0;
}

// Stores the integers of two vectors.
inline void store_pair(int16_t *to, __m256 even, __m256 odd) {
  const __m256i both = _mm256_packs_epi32(_mm256_cvttps_epi32(even), _mm256_cvttps_epi32(odd));
  _mm256_store_si256((__m256i *)to, both);
}

enum class Split { kWhole, kSplit, kInexact };

// Splits a unit of prepared x.
inline Split split_unit(const __m256 (&x)[8], float unit, SplitUnit &out) {
  const LaneScales lanes(x);
  __m256 high[8], low[8], any_rest = _mm256_setzero_ps(), any_left = _mm256_setzero_ps();
  NF4_UNROLL
  for (int j = 0; j < 8; ++j) {
    const __m256 scaled = _mm256_mul_ps(x[j], lanes.inverse[j % 2]);
    const __m256 rest = split_off(scaled, high[j]);
    any_left = _mm256_or_ps(any_left, underflows(x[j], scaled));
    any_rest = _mm256_or_ps(any_rest, rest);
    any_left = _mm256_or_ps(any_left,
                            split_off(_mm256_mul_ps(rest, _mm256_set1_ps(1 / kLowUnit)), low[j]));
  }
  NF4_UNROLL
  for (int j = 0; j < 8; j += 2) {
    store_pair(out.high + 8 * j, high[j], high[j + 1]);
    store_pair(out.low + 8 * j, low[j], low[j + 1]);
  }
  _mm256_store_ps(out.scales, _mm256_mul_ps(lanes.scale, _mm256_set1_ps(unit)));
  if (any_nonzero(any_left)) return Split::kInexact;
  return any_nonzero(any_rest) ? Split::kSplit : Split::kWhole;
}

template <class T, bool kHighFirst>
bool split_x(const void *x, int64_t elements, float unit, int64_t first, SplitX &out,
             float *x_sums) {
  static_assert(T::kUnit == kSplitUnit && T::kVectors == 8);
  const char *from = static_cast<const char *>(x);
  for (int64_t number = first; number < first + elements / T::kUnit; ++number) {
    __m256 in[8], sorted[8], sum = _mm256_setzero_ps();
    NF4_UNROLL
    for (int j = 0; j < 8; ++j, from += T::kLanes * Bf16::kBytes) in[j] = Bf16::load(from);
    T::Order::sort(in);
    NF4_UNROLL
    for (int j = 0; j < 8; ++j) {
      sorted[j] = in[kHighFirst ? j ^ T::Order::kHighNibble : j];
      sum = _mm256_add_ps(sum, sorted[j]);
    }
    _mm256_storeu_ps(x_sums + number * T::kSumLanes, sum);
    // The room after the last whole unit is for either kind.
    SplitUnit &to = out.begin[out.whole_count];
    const Split split = split_unit(sorted, unit, to);
    if (split == Split::kInexact) return false;
    if (split == Split::kWhole) {
      out.whole[out.whole_count++] = static_cast<int16_t>(number);
    } else {
      out.split[out.split_count++] = static_cast<int16_t>(number);
      out.end[-out.split_count] = to;
    }
  }
  return true;
}

// ---- Dot -----------------------------------------------------------------------------

// The sums of products of 16 entries with the four vectors of integers, a sum for each lane.
inline __m256i multiply_integers(const __m256i (&entries)[4], const int16_t *x) {
  __m256i products[4];
  NF4_UNROLL
  for (int j = 0; j < 4; ++j)
    products[j] = _mm256_madd_epi16(entries[j], _mm256_load_si256((const __m256i *)(x + 16 * j)));
  return _mm256_add_epi32(_mm256_add_epi32(products[0], products[1]),
                          _mm256_add_epi32(products[2], products[3]));
}

// Prefetches the rows that follow kN rows: a line of each for two units, and half of the lines for
// each of them.
template <int kN>
__attribute__((always_inline)) inline void prefetch_rows(const uint8_t *packed, int64_t row_bytes,
                                                         int64_t ahead, int64_t number) {
  constexpr int kLines = kN > 1 ? kN / 2 : 1;
  constexpr int64_t kSoon = 512;  // these are in the L2 cache, and go to the L1 cache
  packed += number % 2 * (kN / 2) * row_bytes;
  NF4_UNROLL
  for (int i = 0; i < kLines; ++i, packed += row_bytes) {
    __builtin_prefetch(packed + ahead, 0, 2);
    __builtin_prefetch(packed + kSoon, 0, 3);
  }
}

// Adds the products of units, which have these numbers, with kN rows of the weight.
template <class T, int kN, bool kLow, bool kZeros, bool kHalves>
__attribute__((always_inline)) inline void add_units(const DotArgs &args, int n,
                                                     const typename T::Table &table,
                                                     const SplitUnit *x, const int16_t *numbers,
                                                     int count, __m256 (&totals)[kN]) {
  const int64_t row_bytes = args.row_bytes, scale_stride = args.scale_stride;
  const int64_t ahead = prefetch_distance(kN * row_bytes);
  const uint8_t *const first = args.packed + n * row_bytes;
  const float *const scales = args.scales + n * scale_stride;
  const float *const zeros = args.zeros + n * scale_stride;
  const auto spread = [](const float *scale) {
    return kHalves ? T::spread_scales(scale, 1) : T::broadcast(scale);
  };
  for (const int16_t *end = numbers + count; numbers < end; ++numbers, x += kLow ? -1 : 1) {
    const int64_t number = *numbers;
    const uint8_t *packed = first + number * (T::kUnit / 2);
    int64_t at = kHalves ? 2 * number : number;
    prefetch_rows<kN>(packed, row_bytes, ahead, number);
    NF4_UNROLL
    for (int i = 0; i < kN; ++i, packed += row_bytes, at += scale_stride) {
      __m256i entries[4];
      T::look_up_pairs(table, packed, entries);
      __m256 sum = _mm256_cvtepi32_ps(multiply_integers(entries, x->high));
      if (kLow) {
        const __m256 low = _mm256_cvtepi32_ps(multiply_integers(entries, x->low));
        sum = _mm256_fmadd_ps(low, _mm256_set1_ps(kLowUnit), sum);
      }
      sum = _mm256_mul_ps(sum, _mm256_load_ps(x->scales));
      if (kZeros) {
        const __m256 of_x = _mm256_loadu_ps(args.x_sums + number * T::kSumLanes);
        sum = _mm256_fmadd_ps(of_x, spread(zeros + at), sum);
      }
      totals[i] = _mm256_fmadd_ps(sum, spread(scales + at), totals[i]);
    }
  }
}

template <class T, int kN, bool kZeros, bool kHalves>
void dot_split_rows(const DotArgs &args, int n, const typename T::Table &table) {
  const SplitX &x = *static_cast<const SplitX *>(args.x);
  __m256 totals[kN];
  NF4_UNROLL
  for (int i = 0; i < kN; ++i) totals[i] = _mm256_setzero_ps();
  add_units<T, kN, false, kZeros, kHalves>(args, n, table, x.begin, x.whole, x.whole_count, totals);
  add_units<T, kN, true, kZeros, kHalves>(args, n, table, x.end - 1, x.split, x.split_count,
                                          totals);
  NF4_UNROLL
  for (int i = 0; i < kN; ++i) args.sums[n + i] += T::sum_of(totals[i]);
}

template <class T, bool kZeros, bool kHalves>
void dot_split_all(const DotArgs &args) {
  constexpr int kN = 4;
  const auto table = T::load_table(args.codebook);
  int n = 0;
  for (; n + kN <= args.n; n += kN) dot_split_rows<T, kN, kZeros, kHalves>(args, n, table);
  for (; n < args.n; ++n) dot_split_rows<T, 1, kZeros, kHalves>(args, n, table);
}

template <class T, bool kZeros>
void dot_split(const DotArgs &args) {
  if (args.scales_per_unit > 1) return dot_split_all<T, kZeros, true>(args);
  dot_split_all<T, kZeros, false>(args);
}

}  // namespace
}  // namespace nf4::cpu
