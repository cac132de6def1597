// Turns words of GPTQ and AWQ into rows of codes along the columns, with vectors of any instruction
// set. W is a type of an unnamed namespace (matmul/loops.hpp says why).
//
// A GPTQ word has 8 columns of a row, so squares of words are transposed: half an instruction per
// word, plus its load and store. An AWQ word has 8 rows of a column, so the nibbles of 8 words are
// transposed first, in three steps: 6 instructions per word.
#pragma once

#include <cstdint>

#include "cpu/dequant/kernels.hpp"
#include "cpu/isa/unroll.hpp"

namespace nf4::cpu {

template <class W>
void gptq_rows(const WordsArgs &args) {
  constexpr int kLanes = W::kLanes;
  const int64_t word_rows = args.cols / 8;
  for (int64_t n = 0; n < args.rows; n += kLanes)
    for (int64_t r = 0; r < word_rows; r += kLanes) {
      typename W::Vector square[kLanes];
      NF4_UNROLL
      for (int i = 0; i < kLanes; ++i)
        square[i] =
            W::load(args.words + (r + i) * args.stride + n, r + i < word_rows ? args.rows - n : 0);
      W::transpose(square);
      NF4_UNROLL
      for (int i = 0; i < kLanes; ++i)
        W::store(args.out + (n + i) * args.out_stride + r * 4, square[i]);
    }
}

// Makes words of GPTQ in the order of args.columns from rows of them; there is room for whole
// vectors.
template <class W>
void sorted_words(const WordsArgs &args) {
  const int16_t *columns = args.columns;
  for (int64_t r = 0; r < args.cols / 8; ++r, columns += 8) {
    const uint32_t *from[8];
    typename W::Vector bits[8];
    NF4_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int column = columns[i] < 0 ? 0 : columns[i];
      from[i] = args.words + column / 8 * args.stride;
      bits[i] = W::set((i - column) * 4 & 31);
    }
    uint8_t *const out = args.out + r * args.out_stride;
    for (int64_t n = 0; n < args.rows; n += W::kLanes) {
      typename W::Vector word{};
      NF4_UNROLL
      for (int i = 0; i < 8; ++i)
        word |= W::rotate(W::load(from[i] + n, W::kLanes), bits[i]) & 15u << i * 4;
      W::store(out + n * 4, word);
    }
  }
}

// Turns words of GPTQ into rows of words, one after another.
template <class W>
void gptq_words(const WordsArgs &args) {
  if (args.columns != nullptr) return sorted_words<W>(args);
  for (int64_t r = 0; r < args.cols / 8; ++r)
    for (int64_t n = 0; n < args.rows; n += W::kLanes)
      W::store(args.out + r * args.out_stride + n * 4,
               W::load(args.words + r * args.stride + n, args.rows - n));
}

// Exchanges the high half of each 2 kBits bits of a with the low half of those of b.
template <class W, int kBits>
__attribute__((always_inline)) inline void exchange(typename W::Vector &a, typename W::Vector &b) {
  constexpr uint32_t kLow = kBits == 4 ? 0x0f0f0f0f : kBits == 8 ? 0x00ff00ff : 0x0000ffff;
  const typename W::Vector left = b << kBits, right = a >> kBits;
  a = left ^ ((a ^ left) & kLow);
  b ^= (b ^ right) & kLow;
}

// Nibble i of word j becomes nibble j of word i.
template <class W>
__attribute__((always_inline)) inline void transpose_nibbles(typename W::Vector (&words)[8]) {
  NF4_UNROLL
  for (int i = 0; i < 4; ++i) exchange<W, 16>(words[i], words[i + 4]);
  NF4_UNROLL
  for (int i = 0; i < 4; ++i)
    exchange<W, 8>(words[i / 2 * 4 + i % 2], words[i / 2 * 4 + i % 2 + 2]);
  NF4_UNROLL
  for (int i = 0; i < 8; i += 2) exchange<W, 4>(words[i], words[i + 1]);
}

// Turns rows of codes into words of GPTQ.
template <class W>
void awq_words(const WordsArgs &args) {
  constexpr int kLanes = W::kLanes;
  constexpr int kOrder[] = {0, 2, 4, 6, 1, 3, 5, 7};
  for (int64_t n = 0; n < args.rows; n += kLanes * 8)
    for (int64_t k = 0; k < args.cols; k += 8) {
      typename W::Vector nibbles[8], rows[8];
      NF4_UNROLL
      for (int j = 0; j < 8; ++j) {
        int64_t column = k + j;
        if (args.columns != nullptr) column = args.columns[column] < 0 ? 0 : args.columns[column];
        const uint32_t *from = args.words + column * args.stride + n / 8;
        if (args.columns != nullptr) __builtin_prefetch(from + kLanes, 0, 2);
        nibbles[j] = W::load(from, (args.rows - n) / 8);
      }
      transpose_nibbles<W>(nibbles);
      NF4_UNROLL
      for (int j = 0; j < 8; ++j) rows[kOrder[j]] = nibbles[j];
      W::interleave(rows);
      uint8_t *out = args.out + k / 8 * args.out_stride + n * 4;
      NF4_UNROLL
      for (int j = 0; j < 8; ++j) W::store(out + j * kLanes * 4, rows[j]);
    }
}

// Turns words of GPTQ into words of AWQ, in whole vectors of rows and whole words of columns.
template <class W>
void awq_from_gptq(const WordsArgs &args) {
  constexpr int kLanes = W::kLanes;
  constexpr int kOrder[] = {0, 2, 4, 6, 1, 3, 5, 7};
  for (int64_t n = 0; n < args.rows; n += kLanes * 8)
    for (int64_t k = 0; k < args.cols; k += 8) {
      typename W::Vector rows[8], nibbles[8];
      NF4_UNROLL
      for (int j = 0; j < 8; ++j)
        rows[j] = W::load(args.words + k / 8 * args.stride + n + j * kLanes, kLanes);
      W::deinterleave(rows);
      NF4_UNROLL
      for (int j = 0; j < 8; ++j) nibbles[j] = rows[kOrder[j]];
      transpose_nibbles<W>(nibbles);
      NF4_UNROLL
      for (int j = 0; j < 8; ++j)
        W::store(args.out + (k + j) * args.out_stride + n / 2, nibbles[j]);
    }
}

template <class W>
void awq_rows(const WordsArgs &args) {
  constexpr int kLanes = W::kLanes, kSquareCols = kLanes * 8;
  constexpr int kOrder[] = {0, 2, 4, 6, 1, 3, 5, 7};
  for (int64_t n = 0; n < args.rows; n += kSquareCols) {
    const uint32_t *words = args.words + n / 8;
    const int64_t lanes = (args.rows - n) / 8 < kLanes ? (args.rows - n) / 8 : kLanes;
    for (int64_t k = 0; k < args.cols; k += kSquareCols) {
      typename W::Vector squares[8][kLanes];
      for (int i = 0; i < kLanes; ++i) {
        typename W::Vector nibbles[8];
        NF4_UNROLL
        for (int j = 0; j < 8; ++j) {
          const int64_t column = k + i * 8 + j;
          nibbles[j] = W::load(words + column * args.stride, column < args.cols ? lanes : 0);
        }
        transpose_nibbles<W>(nibbles);
        NF4_UNROLL
        for (int j = 0; j < 8; ++j) squares[j][i] = nibbles[j];
      }
      for (int j = 0; j < 8; ++j) {
        W::transpose(squares[j]);
        for (int64_t i = 0; i < lanes; ++i)
          W::store(args.out + (n + i * 8 + kOrder[j]) * args.out_stride + k / 2, squares[j][i]);
      }
    }
  }
}

}  // namespace nf4::cpu
