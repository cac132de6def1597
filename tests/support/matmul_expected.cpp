#include "support/matmul_expected.hpp"

#include <algorithm>
#include <cstring>

#include "core/int4.hpp"
#include "cpu/parallel.hpp"

namespace nf4::test {
namespace {

float scale_of(const nf4_tensor &weight, int64_t element) {
  if (format_has_scale_bytes(weight.format)) return byte_scale_of(weight, element);
  const int64_t block = element / weight.blocksize;
  if (weight.nested_blocksize == 0) return static_cast<const float *>(weight.absmax)[block];
  const float code = weight.nested_code[static_cast<const uint8_t *>(weight.absmax)[block]];
  // volatile: each operation rounds, whatever the flags of this file.
  volatile float product = code * weight.nested_absmax[block / weight.nested_blocksize];
  return product + *weight.nested_offset;
}

// A y before anything is added.
template <class Host>
Expected bias_of(const MatmulCaseOf<Host> &test, int64_t row) {
  Expected y;
  if (!test.bias.empty()) y.value = read_number(test.dtype, test.bias.data(), row);
  y.magnitude = y.parts = std::fabs(y.value);
  y.energy = y.value * y.value;
  return y;
}

// `largest_value` is the largest of any code; `parts` is the sum, without signs, of the terms that
// a value may be split into.
void add_product(Expected &y, double value, double x, double scale, double largest_value,
                 double parts) {
  y.value += value * x;
  y.magnitude += std::fabs(value * x);
  y.parts += std::fabs(parts * x);
  y.energy += value * x * value * x;
  y.small += std::fabs(x) + std::fabs(scale) + 1;
  y.coarse += std::fabs(x) * (1 + std::fabs(largest_value));
  y.largest = std::max(y.largest, std::fabs(value));
}

}  // namespace

Expected expect(const MatmulCase &test, const nf4_tensor &weight, int64_t column, int64_t row) {
  const float *codebook = weight.codebook ? weight.codebook : nf4_codebook(weight.format);
  double largest_entry = 0;
  for (int i = 0; i < 16; ++i)
    if (std::isfinite(codebook[i]))
      largest_entry = std::max(largest_entry, std::fabs(double{codebook[i]}));
  Expected y = bias_of(test, row);
  for (int64_t k = 0; k < test.x_columns(); ++k) {
    const int64_t element = test.gradient ? k * weight.cols + row : row * weight.cols + k;
    const int byte = static_cast<const uint8_t *>(weight.packed)[element / 2];
    const double scale = scale_of(weight, element);
    const bool high = (element % 2 == 0) != format_has_scale_bytes(weight.format);
    const double value = codebook[high ? byte / 16 : byte % 16] * scale;
    const double x = read_number(test.dtype, test.x.data(), column * test.x_stride + k);
    add_product(y, value, x, scale, scale * largest_entry, value);
  }
  return y;
}

Expected expect(const Int4MatmulCase &test, const nf4_int4_tensor &weight, int64_t column,
                int64_t row) {
  const int64_t groups = test.weight.groups();
  const int64_t group_size = groups == 0 ? 1 : weight.cols / groups;
  const auto *packed = static_cast<const uint32_t *>(weight.packed);
  const auto *zeros = static_cast<const uint32_t *>(weight.zeros);
  Expected y = bias_of(test, row);
  for (int64_t k = 0; k < weight.cols; ++k) {
    const int64_t group = weight.g_idx != nullptr ? weight.g_idx[k] : k / group_size;
    const double scale = read_number(weight.scales_dtype, weight.scales,
                                     int4_scale(weight.layout, weight.rows, groups, row, group));
    const uint32_t code =
        unpack_int4(packed, int4_code(weight.layout, weight.rows, weight.cols, row, k));
    uint32_t zero = kInt4SymmetricZero;
    if (zeros != nullptr)
      zero = unpack_int4_zero(zeros, int4_zero(weight.layout, weight.rows, groups, row, group),
                              static_cast<uint32_t>(weight.zero_offset));
    const int64_t x_column = weight.permutation != nullptr ? weight.permutation[k] : k;
    add_product(y, (static_cast<double>(code) - static_cast<double>(zero)) * scale,
                read_number(test.dtype, test.x.data(), column * test.x_stride + x_column), scale,
                scale * 15, scale * 16);
  }
  return y;
}

template <class Host>
ExpectedProduct::ExpectedProduct(const MatmulCaseOf<Host> &test,
                                 const typename Host::Tensor &weight)
    : rows_(test.y_columns()) {
  const int bytes = dtype_bytes(test.dtype);
  const auto row = [&](int64_t i) { return test.x.data() + i * test.x_stride * bytes; };
  std::vector<int64_t> firsts;  // the first of rows that are the same
  for (int64_t i = 0; i < test.m; ++i) {
    const auto same = std::find_if(firsts.begin(), firsts.end(), [&](int64_t first) {
      return test.x_columns() == 0 ||
             std::memcmp(row(first), row(i), test.x_columns() * bytes) == 0;
    });
    row_of_.push_back(same - firsts.begin());
    if (same == firsts.end()) firsts.push_back(i);
  }
  distinct_.resize(firsts.size() * rows_);
  const int64_t worth_a_thread = 20000 / (test.x_columns() + 1) + 1;
  const auto count = static_cast<int64_t>(distinct_.size());
  cpu::parallel_for(count, worth_a_thread, 0, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      distinct_[i] = expect(test, weight, firsts[i / rows_], i % rows_);
  });
}

template ExpectedProduct::ExpectedProduct(const MatmulCase &, const nf4_tensor &);
template ExpectedProduct::ExpectedProduct(const Int4MatmulCase &, const nf4_int4_tensor &);

}  // namespace nf4::test
