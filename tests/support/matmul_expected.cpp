#include "support/matmul_expected.hpp"

#include <algorithm>
#include <cstring>

#include "cpu/parallel.hpp"

namespace nf4::test {
namespace {

float scale_of(const nf4_tensor &weight, int64_t element) {
  const int64_t block = element / weight.blocksize;
  if (weight.nested_blocksize == 0) return static_cast<const float *>(weight.absmax)[block];
  const float code = weight.nested_code[static_cast<const uint8_t *>(weight.absmax)[block]];
  // volatile: each operation rounds, whatever the flags of this file.
  volatile float product = code * weight.nested_absmax[block / weight.nested_blocksize];
  return product + *weight.nested_offset;
}

}  // namespace

Expected expect(const MatmulCase &test, const nf4_tensor &weight, int64_t column, int64_t row) {
  const float *codebook = weight.codebook ? weight.codebook : nf4_codebook(weight.format);
  double largest_entry = 0;
  for (int i = 0; i < 16; ++i)
    if (std::isfinite(codebook[i]))
      largest_entry = std::max(largest_entry, std::fabs(double{codebook[i]}));
  Expected y;
  if (!test.bias.empty()) y.value = read_number(test.dtype, test.bias.data(), row);
  y.magnitude = std::fabs(y.value);
  y.energy = y.value * y.value;
  for (int64_t k = 0; k < weight.cols; ++k) {
    const int64_t element = row * weight.cols + k;
    const int byte = static_cast<const uint8_t *>(weight.packed)[element / 2];
    const double scale = scale_of(weight, element);
    const double value = codebook[element % 2 == 0 ? byte / 16 : byte % 16] * scale;
    const double x = read_number(test.dtype, test.x.data(), column * test.x_stride + k);
    y.value += value * x;
    y.magnitude += std::fabs(value * x);
    y.energy += value * x * value * x;
    y.small += std::fabs(x) + std::fabs(scale) + 1;
    y.coarse += std::fabs(x) * (1 + std::fabs(scale) * largest_entry);
    y.largest = std::max(y.largest, std::fabs(value));
  }
  return y;
}

ExpectedProduct::ExpectedProduct(const MatmulCase &test, const nf4_tensor &weight)
    : rows_(weight.rows) {
  const int bytes = dtype_bytes(test.dtype);
  const auto row = [&](int64_t i) { return test.x.data() + i * test.x_stride * bytes; };
  std::vector<int64_t> firsts;  // of rows that are the same
  for (int64_t i = 0; i < test.m; ++i) {
    const auto same = std::find_if(firsts.begin(), firsts.end(), [&](int64_t first) {
      return weight.cols == 0 || std::memcmp(row(first), row(i), weight.cols * bytes) == 0;
    });
    row_of_.push_back(same - firsts.begin());
    if (same == firsts.end()) firsts.push_back(i);
  }
  distinct_.resize(firsts.size() * rows_);
  const int64_t worth_a_thread = 20000 / (weight.cols + 1) + 1;
  const auto count = static_cast<int64_t>(distinct_.size());
  cpu::parallel_for(count, worth_a_thread, 0, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      distinct_[i] = expect(test, weight, firsts[i / rows_], i % rows_);
  });
}

}  // namespace nf4::test
