// The kernels of integer weights whose words lie side by side for neighbouring rows, as GPTQ's and
// AWQ's do: a lane is a row of the weight, and x is broadcast. T as in loops.hpp.
//
// GPTQ: a word has 8 columns of a row. AWQ: one column of 8 rows, so a vector of words has 8
// vectors of sums; in bf16, words of two columns are merged, so that a code and its neighbour above
// make a pair. For 32 weights and a row of x: a shift, a look-up and a vdpbf16ps, or twice that in
// fp32.
#pragma once

#include <cstdint>

#include "cpu/isa/unroll.hpp"
#include "cpu/matmul/kernels.hpp"

namespace nf4::cpu {

constexpr int64_t kPrefetchSteps = 3;

// From the words at `at` of a row of `words` to those to prefetch: a few steps ahead, or where the
// row ends there, at its start in the next columns, for which `rows` of words are a group's.
template <class T>
int64_t next_words(const ColumnsArgs &args, int64_t at, int64_t words, int64_t step, int64_t rows) {
  const int64_t ahead = kPrefetchSteps * step;
  if (at + ahead < words) return ahead;
  const int64_t into_next = (at + ahead - words) / step * step;
  return args.groups * rows * args.stride + into_next - at;
}

// Vectors of rows from row n on, of which `lanes` rows there are at least, or kVectors = 1.
template <class T, int kVectors, int kM>
void gptq_block(const ColumnsArgs &args, int64_t n, int64_t lanes) {
  using Item = typename T::Item;
  constexpr int kItems = T::kLanes / T::kSumLanes;  // of a lane
  const auto table = T::load_table(args.codebook);
  const uint32_t *words = args.words + n;
  const int64_t next = next_words<T>(args, n, args.rows, kVectors * T::kSumLanes, args.cols / 8);
  const Item *x = static_cast<const Item *>(args.x);
  for (int g = 0; g < args.groups; ++g) {
    typename T::Sum sums[kVectors][kM];
    NF4_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      NF4_UNROLL
      for (int m = 0; m < kM; ++m) sums[v][m] = T::zero();
    }
    for (int64_t k = 0; k < args.cols; k += 8, words += args.stride) {
      typename T::Codes codes[kVectors];
      NF4_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const uint32_t *from = words + v * T::kSumLanes;
        __builtin_prefetch(from + next, 0, 2);
        codes[v] = T::load_words(from, kVectors == 1 ? lanes : T::kSumLanes);
      }
      NF4_UNROLL
      for (int i = 0; i < 8; i += kItems, x += kItems) {
        typename T::Operand values[kVectors];
        NF4_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          values[v] = T::look_up(table, codes[v]);
          codes[v] = T::next(codes[v]);
        }
        NF4_UNROLL
        for (int m = 0; m < kM; ++m) {
          const auto x_m = T::broadcast(x + m * args.x_stride);
          NF4_UNROLL
          for (int v = 0; v < kVectors; ++v)
            sums[v][m] = T::multiply_add(values[v], x_m, sums[v][m]);
        }
      }
    }
    NF4_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const int64_t first = n + v * T::kSumLanes;
      const int64_t rows = kVectors == 1 ? lanes : T::kSumLanes;
      const auto scale =
          T::load_scales(args.scales + g * args.scale_stride + first, args.fp16_scales, rows);
      typename T::Sum zero = T::zero();
      if (args.zeros != nullptr)
        zero = T::zero_terms(T::spread_zeros(args.zeros + g * args.zero_stride + first / 8, rows,
                                             args.zero_offset, false));
      NF4_UNROLL
      for (int m = 0; m < kM; ++m) {
        float *to = args.sums + m * args.sums_stride + first;
        if (args.zeros != nullptr)
          sums[v][m] = T::scale_add(zero, T::broadcast_sum(args.x_sums[m][g]), sums[v][m]);
        T::store_sums(to, T::scale_add(sums[v][m], scale, T::load_sums(to)));
      }
    }
  }
}

template <class T, int kM>
void gptq_columns_m(const ColumnsArgs &args) {
  constexpr int kVectors = T::kColumnVectors[kM - 1];
  int64_t n = 0;
  for (; n + kVectors * T::kSumLanes <= args.rows; n += kVectors * T::kSumLanes)
    gptq_block<T, kVectors, kM>(args, n, kVectors * T::kSumLanes);
  for (; n < args.rows; n += T::kSumLanes) gptq_block<T, 1, kM>(args, n, args.rows - n);
}

// kHalves halves of the words from word c on, the first of them `half`. Sums are by nibble, and for
// each of them by word.
template <class T, int kHalves, int kM>
void awq_block(const ColumnsArgs &args, int64_t c, int half) {
  using Item = typename T::Item;
  constexpr int kItems = T::kLanes / T::kSumLanes;  // of a lane
  const auto table = T::load_table(args.codebook);
  const int64_t lanes = args.rows / 8 - c;
  const uint32_t *words = args.words + c;
  const int64_t next = next_words<T>(args, c, args.rows / 8, T::kSumLanes, args.cols);
  const Item *x = static_cast<const Item *>(args.x);
  for (int g = 0; g < args.groups; ++g) {
    typename T::Sum sums[kHalves][4][kM];
    NF4_UNROLL
    for (int i = 0; i < kHalves * 4; ++i) {
      NF4_UNROLL
      for (int m = 0; m < kM; ++m) sums[i / 4][i % 4][m] = T::zero();
    }
    for (int64_t k = 0; k < args.cols; k += kItems, x += kItems) {
      typename T::Codes rows[kItems];
      NF4_UNROLL
      for (int i = 0; i < kItems; ++i, words += args.stride) {
        __builtin_prefetch(words + next, 0, 2);
        rows[i] = T::load_words(words, lanes);
      }
      NF4_UNROLL
      for (int h = 0; h < kHalves; ++h) {
        auto codes = T::half_words(rows, kHalves == 2 ? h : half);
        NF4_UNROLL
        for (int i = 0; i < 4; ++i) {
          const auto values = T::look_up(table, codes);
          codes = T::next(codes);
          NF4_UNROLL
          for (int m = 0; m < kM; ++m)
            sums[h][i][m] =
                T::multiply_add(values, T::broadcast(x + m * args.x_stride), sums[h][i][m]);
        }
      }
    }
    typename T::Sum scales[2][4];
    T::load_awq_scales(args.scales + g * args.scale_stride + c * 8, args.fp16_scales, lanes,
                       scales);
    auto zeros = args.zeros == nullptr
                     ? typename T::Codes{}
                     : T::load_words(args.zeros + g * args.zero_stride + c, lanes);
    if (args.zeros != nullptr && half == 1) zeros = T::shift_words(zeros, 16);
    NF4_UNROLL
    for (int i = 0; i < kHalves * 4; ++i) {
      const int nibble = half * 4 + i;
      NF4_UNROLL
      for (int m = 0; m < kM; ++m) {
        float *to = args.sums + m * args.sums_stride + nibble * args.nibble_stride + c;
        auto sum = sums[i / 4][i % 4][m];
        if (args.zeros != nullptr)
          sum = T::scale_add(T::zero_terms(zeros), T::broadcast_sum(args.x_sums[m][g]), sum);
        const auto scale = kHalves == 2 || half == 0 ? scales[i / 4][i % 4] : scales[1][i % 4];
        T::store_sums(to, T::scale_add(sum, scale, T::load_sums(to)));
      }
      zeros = T::shift_words(zeros, 4);
    }
  }
}

template <class T, int kM>
void awq_columns_m(const ColumnsArgs &args) {
  // As many sums as there are registers for.
  constexpr bool kWhole = 8 * kM <= T::kColumnSums;
  for (int64_t c = 0; c < args.rows / 8; c += T::kSumLanes) {
    if constexpr (kWhole) {
      awq_block<T, 2, kM>(args, c, 0);
    } else {
      awq_block<T, 1, kM>(args, c, 0);
      awq_block<T, 1, kM>(args, c, 1);
    }
  }
}

template <class T>
void gptq_columns(const ColumnsArgs &args) {
  static_assert(kMaxDotM == 4, "a case for each");
  switch (args.m) {
    case 1:
      return gptq_columns_m<T, 1>(args);
    case 2:
      return gptq_columns_m<T, 2>(args);
    case 3:
      return gptq_columns_m<T, 3>(args);
    default:
      return gptq_columns_m<T, 4>(args);
  }
}

template <class T>
void awq_columns(const ColumnsArgs &args) {
  switch (args.m) {
    case 1:
      return awq_columns_m<T, 1>(args);
    case 2:
      return awq_columns_m<T, 2>(args);
    case 3:
      return awq_columns_m<T, 3>(args);
    default:
      return awq_columns_m<T, 4>(args);
  }
}

}  // namespace nf4::cpu
