// The adapter of a product, and matrices that are not quantized.
#include <algorithm>
#include <cstring>

#include "cpu/dequant/range.hpp"
#include "cpu/matmul/matmul.hpp"
#include "cpu/matmul/parts.hpp"

namespace nf4::cpu {

void DenseMatrix::read(const MatmulKernels &kernels, int64_t row, int64_t col, int64_t elements,
                       char *out) const {
  const char *from = address(row, col);
  const int64_t bytes_out = element_bytes(kernels.dtype);
  const auto convert = kernels.convert[dtype - 1];
  const bool as_stored = scale == 1 && step == 1;
  if (as_stored && convert != nullptr) {
    const PaddedConversion conversion{convert, kKernelStep, element_bytes(dtype), bytes_out};
    return conversion(from, elements, out);
  }
  std::memset(out + elements * bytes_out, 0, (to_steps(elements) - elements) * bytes_out);
  if (as_stored && dtype == kernels.dtype) {
    std::memcpy(out, from, elements * bytes_out);
    return;
  }
  with_dtype(dtype, [&](auto type) {
    with_dtype(kernels.dtype, [&](auto type_out) {
      const auto *numbers = reinterpret_cast<const decltype(type) *>(from);
      auto *converted = reinterpret_cast<decltype(type_out) *>(out);
      for (int64_t i = 0; i < elements; ++i)
        converted[i] = from_float<decltype(type_out)>(scale * to_float(numbers[i * step]));
    });
  });
}

// The adapter acts as additional columns of the weight: B, multiplied with the scaled product.
void add_adapter(const MatmulKernels &kernels, const MatmulProblem &problem, const Sums &sums) {
  constexpr int64_t kTileN = 16, kTileM = 6;
  alignas(64) char w[kTileN * kMaxLoraRank * sizeof(float)];
  alignas(64) char x[kTileM * kMaxLoraRank * sizeof(float)];
  const Lora &lora = problem.lora;
  if (lora.rank == 0) return;
  const DenseMatrix b{problem.weight.rows, lora.rank, lora.dtype, lora.b, lora.b_stride};
  const DenseMatrix p{problem.m, lora.rank, problem.dtype, lora.product, lora.rank, lora.scale};
  const auto read = [&](const DenseMatrix &matrix, RowRange rows, char *to) {
    for (int64_t i = rows.begin; i < rows.end;
         ++i, to += kMaxLoraRank * element_bytes(kernels.dtype))
      matrix.read(kernels, i, 0, lora.rank, to);
    return static_cast<int>(rows.end - rows.begin);
  };
  for (int64_t n = sums.n.begin; n < sums.n.end; n += kTileN) {
    const int rows = read(b, {n, std::min(sums.n.end, n + kTileN)}, w);
    for (int64_t m = sums.m.begin; m < sums.m.end; m += kTileM) {
      const int count = read(p, {m, std::min(sums.m.end, m + kTileM)}, x);
      kernels.tile({w, kMaxLoraRank, x, kMaxLoraRank, to_steps(lora.rank), rows, count,
                    sums.values + (m - sums.m.begin) * sums.stride + (n - sums.n.begin),
                    sums.stride});
    }
  }
}

void lora_product_vector(const MatmulSet &set, const MatmulProblem &problem, RowRange m) {
  const MatmulKernels &kernels = kernels_for(set, problem.dtype);
  const Lora &lora = problem.lora;
  const Weight &weight = problem.weight;
  const DenseMatrix a{lora.rank, weight.cols, lora.dtype, lora.a, lora.a_stride};
  const DenseMatrix b{weight.rows, lora.rank, lora.dtype, lora.b, lora.b_stride};
  const DenseProblem product =
      adapter_problem(problem, problem.gradient ? b : a, m.begin, m.end - m.begin);
  if (problem.gradient)
    dense_outer(kernels, product);
  else
    matmul_panel(set.dequant, kernels, product, {0, lora.rank});
}

}  // namespace nf4::cpu
