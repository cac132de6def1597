// The codes and scales of a weight in rows of codes, as dot, lanes and transposed read them: its
// codebook in the dtype that the kernels take (DotKernels), its codes, and the scales of elements
// of a row, one for each per_scale elements.
#pragma once

#include <algorithm>
#include <cstring>

#include "core/formats.hpp"
#include "cpu/dequant/int4_groups.hpp"
#include "cpu/matmul/parts.hpp"
#include "cpu/weight/int4.hpp"
#include "cpu/weight/scales.hpp"

namespace nf4::cpu {

// The most scales that read() writes.
constexpr int64_t kMaxRowScales = 16384 / kMinBlocksize + kScalePadding;

// Prefetches the lines of a range, at least the first.
__attribute__((always_inline)) inline void prefetch_lines(const void *from, int64_t bytes) {
  for (int64_t i = 0; i == 0 || i < bytes; i += 64)
    __builtin_prefetch(static_cast<const char *>(from) + i, 0, 2);
}

class CodebookRows {
 public:
  static constexpr bool kHighFirst = true;
  static constexpr auto kDot = &MatmulKernels::codebook_dot;

  CodebookRows(const MatmulKernels &kernels, const Weight &weight,
               const RoundedCodebook &bf16_codebook)
      : CodebookRows(weight, kernels.codebook_dot.codebook_dtype, bf16_codebook,
                     kernels.nested_scales) {}

  const void *codebook() const { return codebook_; }
  float unit() const { return unit_; }  // the unit of the codebook's numbers
  const uint8_t *packed() const { return weight_.packed; }
  int64_t row_bytes() const { return weight_.cols / 2; }
  int64_t block() const { return weight_.blocksize(); }
  bool has_zeros() const { return false; }
  // Tells whether read() may read several whole rows at once.
  bool has_scales_in_rows(int64_t per_scale) const { return per_scale == weight_.blocksize(); }

  void read(int64_t n, int64_t k, int64_t elements, int64_t per_scale, float *scales,
            float *) const {
    const int64_t first_element = n * weight_.cols + k;
    const int64_t first = first_element >> weight_.blocksize_log2;
    const int64_t last = (first_element + elements - 1) >> weight_.blocksize_log2;
    const int64_t count = elements / per_scale;
    if (per_scale == weight_.blocksize())
      return read_scales(weight_, first, count, scales, nested_scales_);
    float by_block[kMaxRowScales];
    read_scales(weight_, first, last - first + 1, by_block, nested_scales_);
    for (int64_t i = 0; i < count; ++i)
      scales[i] = by_block[((first_element + i * per_scale) >> weight_.blocksize_log2) - first];
  }

  // Prefetches what read() reads. It is inlined, as GCC drops calls that only prefetch.
  __attribute__((always_inline)) void prefetch(int64_t n, int64_t k, int64_t elements) const {
    const int64_t first = (n * weight_.cols + k) >> weight_.blocksize_log2;
    const int64_t bytes = weight_.scale_size();
    prefetch_lines(static_cast<const char *>(weight_.absmax) + first * bytes,
                   (elements >> weight_.blocksize_log2) * bytes);
  }

 protected:
  CodebookRows(const Weight &weight, int codebook_dtype, const RoundedCodebook &bf16_codebook,
               NestedScales nested_scales)
      : weight_(weight), codebook_(nf4::cpu::codebook(weight)), nested_scales_(nested_scales) {
    if (codebook_dtype != NF4_DTYPE_BF16) return;
    codebook_ = bf16_codebook.entries;
    unit_ = bf16_codebook.unit;
  }

 private:
  const Weight &weight_;
  const void *codebook_;
  const NestedScales nested_scales_;
  float unit_ = 1;
};

// MXFP4 and NVFP4, whose entries bf16 holds.
class E2m1Rows : public CodebookRows {
 public:
  static constexpr bool kHighFirst = false;
  static constexpr auto kDot = &MatmulKernels::int4_dot;

  E2m1Rows(const MatmulKernels &kernels, const Weight &weight, const RoundedCodebook &)
      : CodebookRows(weight, kernels.int4_dot.codebook_dtype,
                     kFormats[format_row(weight.format)].bf16, nullptr) {}
};

class IntegerRows {
 public:
  static constexpr bool kHighFirst = false;
  static constexpr auto kDot = &MatmulKernels::int4_dot;

  IntegerRows(const DequantKernels &dequant, const MatmulKernels &kernels, const Int4Weight &weight)
      : dequant_(dequant),
        weight_(weight),
        codebook_(int4_codebook(kernels.int4_dot.codebook_dtype)) {}

  const void *codebook() const { return codebook_; }
  float unit() const { return 1; }
  const uint8_t *packed() const { return reinterpret_cast<const uint8_t *>(weight_.packed); }
  int64_t row_bytes() const { return int4_words(weight_.cols) * 4; }
  int64_t block() const { return weight_.group_size; }
  bool has_zeros() const { return weight_.zeros != nullptr; }
  bool has_scales_in_rows(int64_t) const { return false; }

  void read(int64_t n, int64_t k, int64_t elements, int64_t per_scale, float *scales,
            float *zeros) const {
    const int64_t first = k / weight_.group_size;
    const int64_t groups = (k + elements - 1) / weight_.group_size - first + 1;
    if (per_scale == weight_.group_size)
      return dequant_.groups(int4_groups(weight_, n, first, groups, scales, zeros));
    float group_scales[kMaxRowScales], group_zeros[kMaxRowScales];
    dequant_.groups(int4_groups(weight_, n, first, groups, group_scales, group_zeros));
    int64_t g = 0, in_group = k - first * weight_.group_size;
    for (int64_t i = 0; i < elements / per_scale; ++i) {
      scales[i] = group_scales[g];
      zeros[i] = group_zeros[g];
      in_group += per_scale;
      if (in_group < weight_.group_size) continue;
      in_group = 0;
      ++g;
    }
  }

  __attribute__((always_inline)) void prefetch(int64_t n, int64_t k, int64_t elements) const {
    const auto &w = weight_;
    const int64_t first = k / w.group_size, count = elements / w.group_size;
    prefetch_lines(
        static_cast<const uint16_t *>(w.scales) + int4_scale(w.layout, w.rows, w.groups, n, first),
        count * sizeof(uint16_t));
    if (w.zeros != nullptr)
      prefetch_lines(w.zeros + int4_zero(w.layout, w.rows, w.groups, n, first).word,
                     count * sizeof *w.zeros);
  }

 private:
  const DequantKernels &dequant_;
  const Int4Weight &weight_;
  const void *codebook_;
};

// Prepares rows of x for a DotKernels: whole units, padded with zeros.
template <class Problem>
class UnitsOfX {
 public:
  UnitsOfX(const MatmulKernels &kernels, const DotKernels &dot, const Problem &problem)
      : problem_(problem),
        convert_{dot.prepare[problem.dtype - 1], kernels.unit, element_bytes(problem.dtype),
                 element_bytes(kernels.dtype)} {}

  // Prepares the stored columns of row m of x from k on.
  void operator()(int64_t m, int64_t k, int64_t elements, char *out) const {
    if (column_order(problem_.weight) == nullptr)
      return convert_(address_of_x(problem_, m, k), elements, out);
    alignas(float) char gathered[kGathered * sizeof(float)];
    for (int64_t i = 0; i < elements; i += kGathered) {
      const int64_t count = std::min(kGathered, elements - i);
      convert_(part_of_x(problem_, m, k + i, count, gathered), count, out + i * convert_.bytes_out);
    }
  }

  // Copies them as they are, padded alike.
  void copy(int64_t m, int64_t k, int64_t elements, char *out) const {
    const char *from = part_of_x(problem_, m, k, elements, out);
    const int64_t bytes = elements * convert_.bytes_in;
    if (from != out) std::memcpy(out, from, bytes);
    const int64_t units = ceil_divide(elements, convert_.step);
    std::memset(out + bytes, 0, units * convert_.step * convert_.bytes_in - bytes);
  }

 private:
  static constexpr int64_t kGathered = 1024;  // in elements, whole units

  const Problem &problem_;
  const PaddedConversion convert_;
};

// Returns how many elements share a scale, such that both `most` and every row are whole multiples
// of that.
template <class Rows>
int64_t elements_per_scale(const Rows &rows, int64_t cols, int64_t most) {
  int64_t elements = kMinBlocksize;
  while (elements < most && rows.block() % (2 * elements) == 0 && cols % (2 * elements) == 0)
    elements *= 2;
  return elements;
}

}  // namespace nf4::cpu
