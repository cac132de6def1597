// Quantizes to integers with vector kernels: turns groups of rows into rows of codes in the caches,
// and these into words. This file is compiled for the baseline of the target.
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
constexpr int64_t kMaxRows = 128;
// Rows and columns of whole vectors of words.
constexpr int64_t kVectorRows = 128;
// The columns of a row that are quantized at once, if groups are no larger: for rows that stay rows
// of codes, and for rows that become words.
constexpr int64_t kRowColumns = 4096;
constexpr int64_t kWordColumns = 512;

// A single word in the form that word_loops.hpp expects of vectors.
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
  // Tells whether 8 rows of a group have room.
  static bool takes(const Int4Weight &weight) {
    return kInt4PerWord * ceil_divide(weight.group_size, kKernelStep) * kKernelStep / 2 <=
           kCodeBytes;
  }

  Int4Quantizer(const DequantKernels &words, const QuantizeKernels &kernels,
                const Int4QuantizeProblem &problem)
      : words_(words),
        problem_(problem),
        weight_(problem.weight),
        range_(kernels.int4_range[problem.dtype - 1]),
        scales_(kernels.int4_scales),
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
        encode_groups();
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

  // The range of a group is found first, then the scales of some groups, then their codes.
  void quantize_group(int64_t n, int64_t k, uint8_t *codes) {
    const int64_t elements = weight_.group_size, tail = elements % kKernelStep;
    const char *in = address(n, k);
    // Prefetches the part of the row that is quantized next.
    for (int64_t i = 0; i < elements * bytes_; i += 64)
      __builtin_prefetch(in + columns_ * bytes_ + i, 0, 2);
    const int i = count_++;
    groups_[i] = {n, k, codes, range_(in, elements - tail, low_ + i, high_ + i)};
    if (tail > 0) {
      char padded[kKernelStep * sizeof(float)];
      pad_tail(in, padded);
      Int4Range range{low_[i], high_[i]}, of_tail;
      groups_[i].finite &= range_(padded, kKernelStep, &of_tail.low, &of_tail.high);
      range.add(of_tail.low);
      range.add(of_tail.high);
      low_[i] = range.low;
      high_[i] = range.high;
    }
    if (count_ == kInt4Groups) encode_groups();
  }

  const char *address(int64_t n, int64_t k) const {
    return static_cast<const char *>(problem_.in) + (n * weight_.cols + k) * bytes_;
  }

  // Pads the last elements of a group, fewer than a step, with zeros.
  void pad_tail(const char *in, char *padded) const {
    const int64_t tail = weight_.group_size % kKernelStep;
    std::memset(padded, 0, kKernelStep * sizeof(float));
    std::memcpy(padded, in + (weight_.group_size - tail) * bytes_, tail * bytes_);
  }

  void encode_groups() {
    uint16_t bits[kInt4Groups];
    float scales[kInt4Groups], zeros[kInt4Groups];
    scales_({low_, high_, problem_.symmetric, weight_.scales_dtype == NF4_DTYPE_FP16, bits, scales,
             zeros});
    for (int i = 0; i < count_; ++i) {
      const int64_t n = groups_[i].n, g = groups_[i].k / weight_.group_size;
      const int64_t index = int4_scale(weight_.layout, weight_.rows, weight_.groups, n, g);
      static_cast<uint16_t *>(weight_.scales)[index] = bits[i];
      if (weight_.zeros != nullptr) {
        const Int4Place place = int4_zero(weight_.layout, weight_.rows, weight_.groups, n, g);
        weight_.zeros[place.word] |= static_cast<uint32_t>(zeros[i]) << place.shift;
      }
      encode(groups_[i], scales[i], zeros[i]);
    }
    count_ = 0;
  }

  struct Group {
    int64_t n, k;
    uint8_t *codes;
    bool finite;
  };
  void encode(const Group &group, float scale, float zero) const {
    const int64_t elements = weight_.group_size, tail = elements % kKernelStep;
    const char *in = address(group.n, group.k);
    codes_({in, elements - tail, scale, zero, group.finite, group.codes});
    if (tail == 0) return;
    char padded[kKernelStep * sizeof(float)];
    pad_tail(in, padded);
    uint8_t last[kKernelStep / 2];
    codes_({padded, kKernelStep, scale, zero, group.finite, last});
    // Codes beyond the last column are 0.
    const int64_t bytes = ceil_divide(tail, kInt4PerWord) * 4;
    for (int64_t i = tail; i < bytes * 2; ++i) last[i / 2] &= i % 2 == 0 ? 0 : 0x0f;
    std::memcpy(group.codes + (elements - tail) / 2, last, bytes);
  }

  // Makes words from rows of codes.
  void store_words(RowRange n, int64_t k, int64_t columns) const {
    const int64_t count = n.end - n.begin;
    uint32_t *words =
        weight_.packed + int4_code(weight_.layout, weight_.rows, weight_.cols, n.begin, k).word;
    if (weight_.layout == NF4_INT4_COMPRESSED_TENSORS) {
      for (int64_t i = 0; i < count; ++i, words += int4_words(weight_.cols))
        std::memcpy(words, buffer_ + i * stride_, int4_words(columns) * 4);
    } else if (count % kVectorRows == 0 && columns % kVectorRows == 0) {
      store_vectors(words, count, columns);
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

  void store_vectors(uint32_t *words, int64_t rows, int64_t columns) const {
    const bool gptq = weight_.layout == NF4_INT4_GPTQ;
    alignas(64) uint32_t by_column[kCodeBytes / 4];
    uint32_t *const to = gptq ? words : by_column;
    const int64_t stride = gptq ? weight_.rows : rows;
    words_.gptq_rows({reinterpret_cast<const uint32_t *>(buffer_), stride_ / 4,
                      columns / kInt4PerWord, rows * kInt4PerWord, reinterpret_cast<uint8_t *>(to),
                      stride * 4});
    if (!gptq)
      words_.awq_from_gptq(
          {by_column, rows, rows, columns, reinterpret_cast<uint8_t *>(words), weight_.rows / 2});
  }

  // Stores 8 rows of `columns` columns; each column is a word.
  void store_awq(const uint8_t *codes, uint32_t *words, int64_t columns) const {
    uint32_t square[kInt4PerWord];
    for (int i = 0; i < kInt4PerWord; ++i) square[awq_nibble(i)] = read_word(codes + i * stride_);
    transpose_nibbles<OneWord>(square);
    for (int64_t i = 0; i < columns; ++i) words[i * (weight_.rows / 8)] = square[i];
  }

  const DequantKernels &words_;
  const Int4QuantizeProblem &problem_;
  const Int4Weight &weight_;
  bool (*const range_)(const void *, int64_t, float *, float *);
  void (*const scales_)(const Int4ScalesArgs &);
  void (*const codes_)(const Int4CodesArgs &);
  const int64_t bytes_;    // bytes of an element
  const int64_t columns_;  // whole groups
  const int64_t stride_;   // bytes of a row of codes
  const int64_t rows_;
  // Groups whose codes have not been computed yet.
  int count_ = 0;
  Group groups_[kInt4Groups];
  float low_[kInt4Groups] = {};
  float high_[kInt4Groups] = {};
  alignas(64) uint8_t buffer_[kCodeBytes];
};

}  // namespace

void int4_quantize_vector(const DequantKernels &words, const QuantizeKernels &kernels,
                          const Int4QuantizeProblem &problem, RowRange n) {
  if (!Int4Quantizer::takes(problem.weight)) return int4_quantize_reference(problem, n);
  Int4Quantizer(words, kernels, problem)(n);
}

}  // namespace nf4::cpu
