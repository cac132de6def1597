#include "support/cpu_expected.hpp"

#include <algorithm>
#include <cmath>

#include "core/int4.hpp"
#include "cpu/parallel.hpp"
#include "support/cases.hpp"

namespace nf4::test {
namespace {

// An element of the weight. `parts` is the sum, without signs, of the terms that the value may be
// split into.
struct Element {
  double value, scale, parts;
};

struct CodebookElements {
  const nf4_tensor &weight;
  const float *codebook = weight.codebook ? weight.codebook : nf4_codebook(weight.format);

  bool has_scale_bytes() const { return format_has_scale_bytes(weight.format); }
  double scale_of(int64_t element) const {
    if (has_scale_bytes()) return byte_scale_of(weight, element);
    const int64_t block = element / weight.blocksize;
    if (weight.nested_blocksize == 0) return static_cast<const float *>(weight.absmax)[block];
    const float code = weight.nested_code[static_cast<const uint8_t *>(weight.absmax)[block]];
    // volatile: each operation rounds, whatever the flags of this file.
    volatile float product = code * weight.nested_absmax[block / weight.nested_blocksize];
    return product + *weight.nested_offset;
  }
  Element operator()(int64_t row, int64_t k) const {
    const int64_t element = row * weight.cols + k;
    const int byte = static_cast<const uint8_t *>(weight.packed)[element / 2];
    const double scale = scale_of(element);
    const bool high = (element % 2 == 0) != has_scale_bytes();
    const double value = codebook[high ? byte / 16 : byte % 16] * scale;
    return {value, scale, value};
  }
  int64_t x_column(int64_t k) const { return k; }
};

struct IntegerElements {
  const nf4_int4_tensor &weight;
  int64_t groups;

  // The codes and the zero points may be summed separately: a scale times 16 is at least
  // |s (q - 8)| + |s (z - 8)|.
  Element operator()(int64_t row, int64_t k) const {
    const int64_t group = weight.g_idx != nullptr ? weight.g_idx[k] : k / (weight.cols / groups);
    const double scale = read_number(weight.scales_dtype, weight.scales,
                                     int4_scale(weight.layout, weight.rows, groups, row, group));
    const uint32_t code = unpack_int4(static_cast<const uint32_t *>(weight.packed),
                                      int4_code(weight.layout, weight.rows, weight.cols, row, k));
    uint32_t zero = kInt4SymmetricZero;
    if (weight.zeros != nullptr)
      zero = unpack_int4_zero(static_cast<const uint32_t *>(weight.zeros),
                              int4_zero(weight.layout, weight.rows, groups, row, group),
                              static_cast<uint32_t>(weight.zero_offset));
    return {(static_cast<double>(code) - static_cast<double>(zero)) * scale, scale, scale * 16};
  }
  int64_t x_column(int64_t k) const {
    return weight.permutation != nullptr ? weight.permutation[k] : k;
  }
};

CodebookElements elements_of(const MatmulCase &, const nf4_tensor &weight) { return {weight}; }
IntegerElements elements_of(const Int4MatmulCase &test, const nf4_int4_tensor &weight) {
  return {weight, test.weight.groups()};
}

Expected bias_of(nf4_dtype dtype, const std::vector<uint8_t> &bias, int64_t row) {
  Expected y;
  if (!bias.empty()) y.value = read_number(dtype, bias.data(), row);
  y.parts = std::fabs(y.value);
  return y;
}

Expected sum_of(Expected y, const std::vector<Element> &row, const double *x) {
  for (size_t k = 0; k < row.size(); ++k) {
    const Element &element = row[k];
    y.value += element.value * x[k];
    y.parts += std::fabs(element.parts * x[k]);
    y.small += std::fabs(x[k]) + std::fabs(element.scale) + 1;
    y.largest = std::max(y.largest, std::fabs(element.value));
  }
  return y;
}

}  // namespace

template <class Host>
std::vector<Expected> expect_all(const MatmulCaseOf<Host> &test,
                                 const typename Host::Tensor &weight) {
  const auto elements = elements_of(test, weight);
  const int64_t rows = weight.rows, cols = weight.cols;
  std::vector<double> x(test.m * cols);  // in the order of the weight's columns
  for (int64_t i = 0; i < test.m; ++i)
    for (int64_t k = 0; k < cols; ++k)
      x[i * cols + k] =
          read_number(test.dtype, test.x.data(), i * test.x_stride + elements.x_column(k));
  std::vector<Expected> y(test.m * rows);
  const int64_t worth_a_thread = 20000 / (test.m * cols + 1) + 1;
  cpu::parallel_for(rows, worth_a_thread, 0, [&](int64_t begin, int64_t end) {
    std::vector<Element> of_row(cols);
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t k = 0; k < cols; ++k) of_row[k] = elements(row, k);
      for (int64_t i = 0; i < test.m; ++i)
        y[i * rows + row] =
            sum_of(bias_of(test.dtype, test.bias, row), of_row, x.data() + i * cols);
    }
  });
  return y;
}

template std::vector<Expected> expect_all(const MatmulCase &, const nf4_tensor &);
template std::vector<Expected> expect_all(const Int4MatmulCase &, const nf4_int4_tensor &);

}  // namespace nf4::test
