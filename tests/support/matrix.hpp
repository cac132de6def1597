// A matrix of normal numbers between guard pages, NaN between its rows.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "core/float16.hpp"
#include "support/cases.hpp"
#include "support/matmul_cases.hpp"
#include "support/placed.hpp"

namespace nf4::test {

struct Matrix {
  nf4_dtype dtype;
  int64_t rows, cols, stride;
  GuardedBuffer buffer;

  Matrix(Rng &rng, nf4_dtype of, int64_t rows_of, int64_t cols_of, bool contiguous = false)
      : dtype(of),
        rows(rows_of),
        cols(cols_of),
        stride(cols + (contiguous || rng.one_in(2) ? 0 : rng.below(40))),
        buffer(random_buffer(
            rng, rows == 0 || cols == 0 ? 0 : ((rows - 1) * stride + cols) * dtype_bytes(of),
            dtype_bytes(of))) {}

  Matrix &fill(Rng &rng) {
    std::memset(buffer.data(), 0xff, buffer.size());
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j) set(i, j, rng.normal());
    return *this;
  }
  void set(int64_t i, int64_t j, float x) {
    const int64_t at = i * stride + j;
    if (dtype == NF4_DTYPE_FP32) return void(std::memcpy(buffer.data() + 4 * at, &x, 4));
    const uint16_t bits = dtype == NF4_DTYPE_FP16 ? float_to_half(x) : float_to_bf16(x);
    std::memcpy(buffer.data() + 2 * at, &bits, 2);
  }
  double operator()(int64_t i, int64_t j) const {
    return read_number(dtype, buffer.data(), i * stride + j);
  }
  std::vector<uint8_t> bytes() const { return {buffer.data(), buffer.data() + buffer.size()}; }
  // Tells whether the memory between the rows is still poison.
  bool gaps_untouched() const {
    const int64_t item = dtype_bytes(dtype);
    for (int64_t i = 0; i < static_cast<int64_t>(buffer.size()); ++i)
      if (i % (stride * item) >= cols * item && buffer.data()[i] != 0xa5) return false;
    return true;
  }
};

}  // namespace nf4::test
