// Says where integer weights keep the code, the zero point and the scale of an element, and
// computes its value. The layouts are those of GPTQModel (nn_modules/qlinear), AutoAWQ
// (WQLinear_GEMM) and compressed-tensors (pack-quantized).
#pragma once

#include <cstdint>

#include "core/decode.hpp"
#include "core/macros.hpp"
#include "nf4/nf4.h"

namespace nf4 {

constexpr int kInt4PerWord = 8;
constexpr uint32_t kInt4SymmetricZero = 8;

// The place of a code in an array of words: bits [shift, shift + 4) of a word.
struct Int4Place {
  int64_t word;
  int shift;
};

NF4_HOST_DEVICE uint32_t unpack_int4(const uint32_t *words, Int4Place place) {
  return words[place.word] >> place.shift & 15u;
}

// Nibble i of an AWQ word holds column 8 c + {0, 2, 4, 6, 1, 3, 5, 7}[i]; this is the inverse.
NF4_HOST_DEVICE constexpr int awq_nibble(int index) { return index / 2 + index % 2 * 4; }

NF4_HOST_DEVICE constexpr int64_t int4_words(int64_t codes) {
  return codes / kInt4PerWord + (codes % kInt4PerWord != 0);
}

// The number of words of the codes and of the zeros of a weight.
NF4_HOST_DEVICE constexpr int64_t int4_packed_words(nf4_int4_layout layout, int64_t rows,
                                                    int64_t cols) {
  return layout == NF4_INT4_COMPRESSED_TENSORS ? rows * int4_words(cols)
                                               : rows * cols / kInt4PerWord;
}
NF4_HOST_DEVICE constexpr int64_t int4_zero_words(int64_t rows, int64_t groups) {
  return int4_words(rows) * groups;
}

// The place of the code of row n, stored column k.
NF4_HOST_DEVICE Int4Place int4_code(nf4_int4_layout layout, int64_t rows, int64_t cols, int64_t n,
                                    int64_t k) {
  if (layout == NF4_INT4_GPTQ) return {k / 8 * rows + n, static_cast<int>(k % 8) * 4};
  if (layout == NF4_INT4_AWQ)
    return {k * (rows / 8) + n / 8, awq_nibble(static_cast<int>(n % 8)) * 4};
  return {n * int4_words(cols) + k / 8, static_cast<int>(k % 8) * 4};
}

// The place of the stored zero of row n, group g.
NF4_HOST_DEVICE Int4Place int4_zero(nf4_int4_layout layout, int64_t rows, int64_t groups, int64_t n,
                                    int64_t g) {
  const int index = static_cast<int>(n % 8);
  if (layout == NF4_INT4_GPTQ) return {g * int4_words(rows) + n / 8, index * 4};
  if (layout == NF4_INT4_AWQ) return {g * (rows / 8) + n / 8, awq_nibble(index) * 4};
  return {n / 8 * groups + g, index * 4};
}

// The index of the scale of row n, group g.
NF4_HOST_DEVICE int64_t int4_scale(nf4_int4_layout layout, int64_t rows, int64_t groups, int64_t n,
                                   int64_t g) {
  return layout == NF4_INT4_COMPRESSED_TENSORS ? n * groups + g : g * rows + n;
}

// Decodes a word of stored zeros. GPTQ v1 stores z - 1, subtracted from the whole word as GPTQModel
// does: a zero of 0 borrows from the next one.
constexpr uint32_t kInt4Ones = 0x11111111;
constexpr uint32_t kInt4SymmetricZeros = kInt4SymmetricZero * kInt4Ones;  // a word of eight
NF4_HOST_DEVICE uint32_t int4_zero_word(uint32_t stored, uint32_t zero_offset) {
  return stored + zero_offset * kInt4Ones;
}
NF4_HOST_DEVICE uint32_t unpack_int4_zero(const uint32_t *words, Int4Place place,
                                          uint32_t zero_offset) {
  return int4_zero_word(words[place.word], zero_offset) >> place.shift & 15u;
}

// The product is exact: the difference has 5 bits and a 16-bit scale has at most 11.
NF4_HOST_DEVICE float int4_value(uint32_t code, uint32_t zero, float scale) {
  return multiply_rn(static_cast<float>(static_cast<int>(code) - static_cast<int>(zero)), scale);
}

}  // namespace nf4
