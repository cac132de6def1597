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

// A row of the weight, and what all its products share.
struct Row {
  std::vector<double> values, parts;
  double scales = 0, largest = 0;  // their sum and maximum, without signs
};

template <class Elements>
Row row_of(const Elements &elements, int64_t row, int64_t cols) {
  Row made{std::vector<double>(cols), std::vector<double>(cols)};
  for (int64_t k = 0; k < cols; ++k) {
    const Element element = elements(row, k);
    made.values[k] = element.value;
    made.parts[k] = element.parts;
    made.scales += std::fabs(element.scale);
    made.largest = std::max(made.largest, std::fabs(element.value));
  }
  return made;
}

// x_sum is the sum of x without signs. Tests spend much of their time in this loop: it has sums
// that do not wait for each other.
Expected sum_of(Expected y, const Row &row, const double *x, double x_sum) {
  const size_t cols = row.values.size(), even = cols / 2 * 2;
  double values[2] = {y.value, 0}, parts[2] = {y.parts, 0};
  const auto add = [&](size_t k, int to) {
    values[to] += row.values[k] * x[k];
    parts[to] += std::fabs(row.parts[k] * x[k]);
  };
  for (size_t k = 0; k < even; k += 2) {
    add(k, 0);
    add(k + 1, 1);
  }
  if (even < cols) add(even, 0);
  y.value = values[0] + values[1];
  y.parts = parts[0] + parts[1];
  y.small = x_sum + row.scales + static_cast<double>(cols);
  y.largest = row.largest;
  return y;
}

}  // namespace

template <class Host>
std::vector<Expected> expect_all(const MatmulCaseOf<Host> &test,
                                 const typename Host::Tensor &weight) {
  const auto elements = elements_of(test, weight);
  const int64_t rows = weight.rows, cols = weight.cols;
  std::vector<double> x(test.m * cols), x_sums(test.m);  // in the order of the weight's columns
  for (int64_t i = 0; i < test.m; ++i)
    for (int64_t k = 0; k < cols; ++k) {
      x[i * cols + k] =
          read_number(test.dtype, test.x.data(), i * test.x_stride + elements.x_column(k));
      x_sums[i] += std::fabs(x[i * cols + k]);
    }
  std::vector<Expected> y(test.m * rows);
  const int64_t worth_a_thread = 20000 / (test.m * cols + 1) + 1;
  cpu::parallel_for(rows, worth_a_thread, 0, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Row of_row = row_of(elements, row, cols);
      for (int64_t i = 0; i < test.m; ++i)
        y[i * rows + row] =
            sum_of(bias_of(test.dtype, test.bias, row), of_row, x.data() + i * cols, x_sums[i]);
    }
  });
  return y;
}

template std::vector<Expected> expect_all(const MatmulCase &, const nf4_tensor &);
template std::vector<Expected> expect_all(const Int4MatmulCase &, const nf4_int4_tensor &);

}  // namespace nf4::test
