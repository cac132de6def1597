// Quantize to integers by vector kernels: groups of rows to rows of codes in the caches, and these
// to words. Compiled for the baseline of the target.
#include "cpu/weight/int4.hpp"

#include <algorithm>
#include <cstring>

#include "core/round_int4.hpp"
#include "cpu/dequant/word_loops.hpp"
#include "cpu/quantize/quantize.hpp"
#include "cpu/reference.hpp"

namespace nf4::cpu {
namespace {

constexpr int64_t kCodeBytes = 32768;
constexpr int64_t kMaxRows = 64;
// Of a row, quantized at once, if groups are no larger: of rows that become rows of codes, and of
// those that become words.
constexpr int64_t kRowColumns = 4096;
constexpr int64_t kWordColumns = 512;

// One word as word_loops.hpp wants vectors.
struct OneWord {
  using Vector = uint32_t;
};

uint32_t read_word(const uint8_t *from) {
  uint32_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

class Int4Quantizer {
 public:
  // Whether 8 rows of a group have room.
  static bool takes(const Int4Weight &weight) {
    return kInt4PerWord * ceil_divide(weight.group_size, kKernelStep) * kKernelStep / 2 <=
           kCodeBytes;
  }

  Int4Quantizer(const QuantizeKernels &kernels, const Int4QuantizeProblem &problem)
      : problem_(problem),
        weight_(problem.weight),
        range_(kernels.int4_range[problem.dtype - 1]),
        codes_(kernels.int4_codes[problem.dtype - 1]),
        bytes_(element_bytes(problem.dtype)),
        columns_(whole_groups(
            weight_, weight_.layout == NF4_INT4_COMPRESSED_TENSORS ? kRowColumns : kWordColumns)),
        stride_(ceil_divide(columns_, kKernelStep) * kKernelStep / 2),
        rows_(std::min(kMaxRows, kCodeBytes / stride_ / kInt4PerWord * kInt4PerWord)) {}

  void operator()(RowRange n) {
    for_words_of_zeros(n, [](uint32_t &word) { word = 0; });
    for (int64_t i = n.begin; i < n.end; i += rows_)
      for (int64_t k = 0; k < weight_.cols; k += columns_) {
        const RowRange rows{i, std::min(n.end, i + rows_)};
        const int64_t columns = std::min(columns_, weight_.cols - k);
        for (int64_t row = rows.begin; row < rows.end; ++row)
          for (int64_t at = 0; at < columns; at += weight_.group_size)
            quantize_group(row, k + at, buffer_ + (row - i) * stride_ + at / 2);
        store_words(rows, k, columns);
      }
    for_words_of_zeros(n, [this](uint32_t &word) { word -= weight_.zero_offset * kInt4Ones; });
  }

 private:
  static int64_t whole_groups(const Int4Weight &weight, int64_t columns) {
    return std::max<int64_t>(1, columns / weight.group_size) * weight.group_size;
  }

  template <class Change>
  void for_words_of_zeros(RowRange n, const Change &change) const {
    if (weight_.zeros == nullptr) return;
    for (int64_t row = n.begin; row < n.end; row += kInt4PerWord)
      for (int64_t g = 0; g < weight_.groups; ++g)
        change(weight_.zeros[int4_zero(weight_.layout, weight_.rows, weight_.groups, row, g).word]);
  }

  void quantize_group(int64_t n, int64_t k, uint8_t *codes) {
    const int64_t elements = weight_.group_size, tail = elements % kKernelStep;
    const char *in = static_cast<const char *>(problem_.in) + (n * weight_.cols + k) * bytes_;
    // What is quantized of the row next.
    for (int64_t i = 0; i < elements * bytes_; i += 64)
      __builtin_prefetch(in + columns_ * bytes_ + i, 0, 2);
    Int4Range range;
    range_(in, elements - tail, &range.low, &range.high);
    char padded[kKernelStep * sizeof(float)];
    if (tail > 0) {
      std::memset(padded, 0, sizeof padded);
      std::memcpy(padded, in + (elements - tail) * bytes_, tail * bytes_);
      Int4Range of_tail;
      range_(padded, kKernelStep, &of_tail.low, &of_tail.high);
      range.add(of_tail.low);
      range.add(of_tail.high);
    }
    const auto [scale, zero] = store_scale(n, k / weight_.group_size, range);
    codes_({in, elements - tail, scale, static_cast<float>(zero), codes});
    if (tail == 0) return;
    uint8_t last[kKernelStep / 2];
    codes_({padded, kKernelStep, scale, static_cast<float>(zero), last});
    // Codes of no column are 0.
    const int64_t bytes = ceil_divide(tail, kInt4PerWord) * 4;
    for (int64_t i = tail; i < bytes * 2; ++i) last[i / 2] &= i % 2 == 0 ? 0 : 0x0f;
    std::memcpy(codes + (elements - tail) / 2, last, bytes);
  }

  struct ScaleAndZero {
    float scale;
    uint32_t zero;
  };
  ScaleAndZero store_scale(int64_t n, int64_t g, const Int4Range &range) {
    const int64_t index = int4_scale(weight_.layout, weight_.rows, weight_.groups, n, g);
    const float exact = int4_exact_scale(range, problem_.symmetric);
    const bool fp16 = weight_.scales_dtype == NF4_DTYPE_FP16;
    static_cast<uint16_t *>(weight_.scales)[index] =
        int4_scale_bits(fp16 ? float_to_half(exact) : float_to_bf16(exact), weight_.scales_dtype);
    const float scale = int4_scale_at(weight_, index);
    const uint32_t zero = int4_zero_of(range, problem_.symmetric, scale);
    if (weight_.zeros != nullptr) {
      const Int4Place place = int4_zero(weight_.layout, weight_.rows, weight_.groups, n, g);
      weight_.zeros[place.word] |= zero << place.shift;
    }
    return {scale, zero};
  }

  // From rows of codes.
  void store_words(RowRange n, int64_t k, int64_t columns) const {
    const int64_t count = n.end - n.begin;
    uint32_t *words =
        weight_.packed + int4_code(weight_.layout, weight_.rows, weight_.cols, n.begin, k).word;
    if (weight_.layout == NF4_INT4_COMPRESSED_TENSORS) {
      for (int64_t i = 0; i < count; ++i, words += int4_words(weight_.cols))
        std::memcpy(words, buffer_ + i * stride_, int4_words(columns) * 4);
    } else if (weight_.layout == NF4_INT4_GPTQ) {
      for (int64_t r = 0; r < columns / kInt4PerWord; ++r, words += weight_.rows)
        for (int64_t i = 0; i < count; ++i) words[i] = read_word(buffer_ + i * stride_ + r * 4);
    } else {
      for (int64_t r = 0; r < columns; r += kInt4PerWord)
        for (int64_t i = 0; i < count; i += kInt4PerWord)
          store_awq(buffer_ + i * stride_ + r / 2, words + r * (weight_.rows / 8) + i / 8,
                    std::min<int64_t>(kInt4PerWord, columns - r));
    }
  }

  // 8 rows and so many columns, of which each is a word.
  void store_awq(const uint8_t *codes, uint32_t *words, int64_t columns) const {
    uint32_t square[kInt4PerWord];
    for (int i = 0; i < kInt4PerWord; ++i) square[awq_nibble(i)] = read_word(codes + i * stride_);
    transpose_nibbles<OneWord>(square);
    for (int64_t i = 0; i < columns; ++i) words[i * (weight_.rows / 8)] = square[i];
  }

  const Int4QuantizeProblem &problem_;
  const Int4Weight &weight_;
  void (*const range_)(const void *, int64_t, float *, float *);
  void (*const codes_)(const Int4CodesArgs &);
  const int64_t bytes_;    // of an element
  const int64_t columns_;  // whole groups
  const int64_t stride_;   // of a row of codes
  const int64_t rows_;
  alignas(64) uint8_t buffer_[kCodeBytes];
};

}  // namespace

void int4_quantize_vector(const QuantizeKernels &kernels, const Int4QuantizeProblem &problem,
                          RowRange n) {
  if (!Int4Quantizer::takes(problem.weight)) return int4_quantize_reference(problem, n);
  Int4Quantizer(kernels, problem)(n);
}

}  // namespace nf4::cpu
