// The kernels of integer weights whose words lie side by side for neighbouring rows, as in GPTQ and
// AWQ: a lane is a row of the weight, and x is broadcast. T is as in loops.hpp.
//
// A GPTQ word has 8 columns of a row. An AWQ word has one column of 8 rows, so a vector of words
// has 8 vectors of sums; in bf16, words of two columns are merged, so that a code and its neighbour
// above make a pair. 32 weights take a shift and a look-up, plus a vdpbf16ps for each row of x, or
// twice that in fp32. With many rows of x the products are the bound, with one row memory is. For
// many rows the words are a block in the L1 cache, and scales and zeros are numbers (columns.cpp).
#pragma once

#include <cstdint>

#include "cpu/isa/unroll.hpp"
#include "cpu/matmul/kernels.hpp"

namespace nf4::cpu {

// ---- x -------------------------------------------------------------------------------

// Converts whole steps of x. In bf16, the columns in the two halves of a GPTQ word come side by
// side.
template <class T>
void pair_columns(const void *x, int64_t elements, void *out) {
  const auto *from = static_cast<const typename T::Item *>(x);
  auto *to = static_cast<typename T::Item *>(out);
  for (int64_t i = 0; i < elements; i += T::kLanes) T::store(to + i, T::pair(T::load(from + i)));
}

template <class T>
void column_sums(const void *x, int64_t stride, int64_t cols, int64_t count, float *sums) {
  const auto *from = static_cast<const typename T::Item *>(x);
  for (; count > 0; count -= 4, from += 4 * stride, sums += 4) {
    // The last one stands in for vectors that do not exist.
    const int64_t last = (count < 4 ? count : 4) - 1;
    typename T::Sum four[4] = {T::zero(), T::zero(), T::zero(), T::zero()};
    for (int64_t i = 0; i < cols; i += T::kLanes) {
      NF4_UNROLL
      for (int64_t j = 0; j < 4; ++j)
        four[j] = T::multiply_add(
            T::one(), T::load_some(from + (j < last ? j : last) * stride + i, cols - i), four[j]);
    }
    float to[4] = {};
    T::add_sums(four[0], four[1], four[2], four[3], to);
    if (last == 3)
      __builtin_memcpy(sums, to, sizeof to);
    else
      for (int64_t j = 0; j <= last; ++j) sums[j] = to[j];
  }
}

// ---- GPTQ ----------------------------------------------------------------------------

constexpr int64_t kPrefetchSteps = 3;

// The distance from the words at `at`, in a row of `words`, to the words to prefetch. They are a
// few steps ahead or, beyond the end of the row, at its start in the next columns. A group has
// `rows` rows of words.
template <class T>
int64_t words_ahead(const ColumnsArgs &args, int64_t at, int64_t words, int64_t step,
                    int64_t rows) {
  const int64_t ahead = kPrefetchSteps * step;
  if (at + ahead < words) return ahead;
  const int64_t into_next = (at + ahead - words) / step * step;
  return args.groups * rows * args.stride + into_next - at;
}

// The scales and zeros for words of GPTQ, and the words to prefetch. Here they are in the weight,
// and are read as they are stored. In a block they are numbers, and the words that it is made of
// next are elsewhere.
template <class T>
struct InWeight {
  static typename T::Sum scale(const ColumnsArgs &args, int g, int64_t n, int64_t rows) {
    const uint16_t *from = args.scales + g * args.scale_stride + n;
    __builtin_prefetch(from + args.groups * args.scale_stride, 0, 2);
    return T::load_scales(from, args.fp16_scales, rows);
  }
  static typename T::Sum zero(const ColumnsArgs &args, int g, int64_t n, int64_t rows) {
    const uint32_t *from = args.zeros + g * args.zero_stride + n / 8;
    __builtin_prefetch(from + args.groups * args.zero_stride, 0, 2);
    return T::zero_terms(T::spread_zeros(from, rows, args.zero_offset, false));
  }
  static Ahead ahead(const ColumnsArgs &args, int64_t n, int64_t step) {
    return {args.words + n + words_ahead<T>(args, n, args.rows, step, args.cols / 8), args.stride,
            T::kSumLanes};
  }
};
template <class T>
struct InBlock {
  static typename T::Sum scale(const ColumnsArgs &args, int g, int64_t n, int64_t) {
    return T::load_sums(args.block_scales + g * args.scale_stride + n);
  }
  static typename T::Sum zero(const ColumnsArgs &args, int g, int64_t n, int64_t) {
    return T::load_sums(args.block_zeros + g * args.scale_stride + n);
  }
  static Ahead ahead(const ColumnsArgs &args, int64_t n, int64_t) {
    return {args.next.words + n / T::kSumLanes * args.next.step, args.next.stride, args.next.step};
  }
};

// Multiplies vectors of rows from row n on with rows of x from m_begin on. There are at least
// `lanes` rows, or kVectors is 1.
template <class T, class Source, int kVectors, int kM>
void gptq_block(const ColumnsArgs &args, int64_t n, int64_t lanes, int m_begin) {
  using Item = typename T::Item;
  constexpr int kItems = T::kLanes / T::kSumLanes;  // in a lane
  const auto table = T::load_table(args.codebook);
  const bool has_zeros = args.x_sums != nullptr;
  const uint32_t *words = args.words + n;
  Ahead next = Source::ahead(args, n, kVectors * T::kSumLanes);
  const Item *x = static_cast<const Item *>(args.x) + m_begin * args.x_stride;
  const float *x_sums = args.x_sums + m_begin * args.x_sums_stride;
  for (int g = 0; g < args.groups; ++g) {
    typename T::Sum sums[kVectors][kM];
    NF4_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      NF4_UNROLL
      for (int m = 0; m < kM; ++m) sums[v][m] = T::zero();
    }
    for (int64_t k = 0; k < args.cols; k += 8, words += args.stride, next.words += next.stride) {
      typename T::Codes codes[kVectors];
      NF4_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        __builtin_prefetch(next.words + v * next.step, 0, 2);
        codes[v] = T::load_words(words + v * T::kSumLanes, kVectors == 1 ? lanes : T::kSumLanes);
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
      const auto scale = Source::scale(args, g, first, rows);
      const auto zero = has_zeros ? Source::zero(args, g, first, rows) : T::zero();
      NF4_UNROLL
      for (int m = 0; m < kM; ++m) {
        float *to = args.sums + (m_begin + m) * args.sums_stride + first;
        if (has_zeros)
          sums[v][m] =
              T::scale_add(zero, T::broadcast_sum(x_sums[m * args.x_sums_stride + g]), sums[v][m]);
        T::store_sums(to, T::scale_add(sums[v][m], scale, T::load_sums(to)));
      }
    }
  }
}

// The number of vectors to process together, up to 8, given the registers that each takes.
template <class T>
constexpr int columns_together(int registers) {
  constexpr int kThere = T::kColumnRegisters;
  return 8 * registers <= kThere   ? 8
         : 4 * registers <= kThere ? 4
         : 2 * registers <= kThere ? 2
                                   : 1;
}

// Processes the rows from row n on, as many vectors at a time as there are, at most kVectors.
template <class T, class Source, int kVectors, int kM>
void gptq_rows(const ColumnsArgs &args, int64_t n, int m) {
  constexpr int64_t kRows = kVectors * T::kSumLanes;
  for (; n + kRows <= args.rows; n += kRows) gptq_block<T, Source, kVectors, kM>(args, n, kRows, m);
  if constexpr (kVectors > 1)
    gptq_rows<T, Source, kVectors / 2, kM>(args, n, m);
  else if (n < args.rows)
    gptq_block<T, Source, 1, kM>(args, n, args.rows - n, m);
}

template <class T, class Source, int kM>
void gptq_rows_of_x(const ColumnsArgs &args, int m, int count) {
  if constexpr (kM > 1)
    if (count < kM) return gptq_rows_of_x<T, Source, kM - 1>(args, m, count);
  gptq_rows<T, Source, columns_together<T>(kM + 2), kM>(args, 0, m);
}

template <class T>
void gptq_columns(const ColumnsArgs &args) {
  gptq_rows_of_x<T, InWeight<T>, kMaxDotM>(args, 0, args.m);
}

// Splits the rows of x into parts that are as even as possible.
template <class T>
void block_columns(const ColumnsArgs &args) {
  const int parts = (args.m + T::kColumnM - 1) / T::kColumnM;
  for (int i = 0; i < parts; ++i) {
    const int first = args.m * i / parts, last = args.m * (i + 1) / parts;
    gptq_rows_of_x<T, InBlock<T>, T::kColumnM>(args, first, last - first);
  }
}

// ---- AWQ -----------------------------------------------------------------------------

// Prefetches the words of the next columns row by row, a vector for each one that is multiplied.
// Memory is read faster in long parts of rows than in the order of the products.
template <class T>
class NextWords {
 public:
  // done: the number of vectors multiplied before.
  NextWords(const ColumnsArgs &args, int64_t vectors_of_row, int64_t done)
      : skip_(args.next.stride - vectors_of_row * T::kSumLanes),
        vectors_of_row_(vectors_of_row),
        left_(vectors_of_row - done % vectors_of_row),
        at_(args.next.words + done / vectors_of_row * args.next.stride +
            done % vectors_of_row * T::kSumLanes) {}

  void prefetch() {
    __builtin_prefetch(at_, 0, 2);
    at_ += T::kSumLanes;
    if (--left_ > 0) return;
    left_ = vectors_of_row_;
    at_ += skip_;
  }

 private:
  const int64_t skip_, vectors_of_row_;
  int64_t left_;
  const uint32_t *at_;
};

// Multiplies kHalves halves of the words from word c on; the first of them is `half`. Sums are by
// nibble, and for each nibble by word.
template <class T, int kHalves, int kM>
void awq_block(const ColumnsArgs &args, int64_t c, int half) {
  using Item = typename T::Item;
  constexpr int kItems = T::kLanes / T::kSumLanes;  // in a lane
  const auto table = T::load_table(args.codebook);
  const int64_t lanes = args.rows / 8 - c;
  const uint32_t *words = args.words + c;
  NextWords<T> next(args, (args.rows / 8 + T::kSumLanes - 1) / T::kSumLanes,
                    c / T::kSumLanes * args.cols * args.groups);
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
        next.prefetch();
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
    const uint16_t *const from = args.scales + g * args.scale_stride + c * 8;
    NF4_UNROLL
    for (int i = 0; i < 8 * T::kSumLanes; i += 32)
      __builtin_prefetch(from + args.groups * args.scale_stride + i, 0, 2);
    T::load_awq_scales(from, args.fp16_scales, lanes, scales);
    auto zeros = typename T::Codes{};
    if (args.x_sums != nullptr) {
      const uint32_t *const words_of_zeros = args.zeros + g * args.zero_stride + c;
      __builtin_prefetch(words_of_zeros + args.groups * args.zero_stride, 0, 2);
      zeros = T::load_words(words_of_zeros, lanes);
    }
    if (half == 1) zeros = T::shift_words(zeros, 16);
    NF4_UNROLL
    for (int i = 0; i < kHalves * 4; ++i) {
      const int nibble = half * 4 + i;
      NF4_UNROLL
      for (int m = 0; m < kM; ++m) {
        float *to = args.sums + m * args.sums_stride + nibble * args.nibble_stride + c;
        auto sum = sums[i / 4][i % 4][m];
        if (args.x_sums != nullptr)
          sum = T::scale_add(T::zero_terms(zeros),
                             T::broadcast_sum(args.x_sums[m * args.x_sums_stride + g]), sum);
        const auto scale = kHalves == 2 || half == 0 ? scales[i / 4][i % 4] : scales[1][i % 4];
        T::store_sums(to, T::scale_add(sum, scale, T::load_sums(to)));
      }
      zeros = T::shift_words(zeros, 4);
    }
  }
}

template <class T, int kM>
void awq_rows_of_x(const ColumnsArgs &args) {
  if constexpr (kM > 1)
    if (args.m < kM) return awq_rows_of_x<T, kM - 1>(args);
  // Sums are limited by the number of registers.
  constexpr bool kWhole = columns_together<T>(kM) == 8;
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
void awq_columns(const ColumnsArgs &args) {
  awq_rows_of_x<T, kMaxDotM>(args);
}

}  // namespace nf4::cpu
