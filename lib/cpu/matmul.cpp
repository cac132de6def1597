// The choice between the ways of matmul, and what they share.
#include "cpu/matmul.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/formats.hpp"
#include "cpu/dtypes.hpp"
#include "cpu/matmul_parts.hpp"
#include "cpu/scales.hpp"

namespace nf4::cpu {
namespace {

constexpr int64_t kMaxStepBytes = 128 * sizeof(float);

// Numbers that neither padding nor bf16 can turn into others: zero times each of them is zero.
bool is_ordinary(float x) { return x == 0 || (std::fabs(x) > 0x1p-60f && std::fabs(x) < 0x1p60f); }

bool suits_dot(const MatmulKernels &kernels, const MatmulProblem &problem) {
  const float *entries = codebook(problem.weight);
  return problem.m <= kernels.max_dot_m && problem.weight.cols % kKernelStep == 0 &&
         std::all_of(entries, entries + kCodebookSize, is_ordinary);
}

}  // namespace

void PaddedConversion::operator()(const char *x, int64_t elements, char *out) const {
  const int64_t whole = elements - elements % step;
  convert(x, whole, out);
  if (whole == elements) return;
  char padded[kMaxStepBytes] = {};
  std::memcpy(padded, x + whole * bytes_in, (elements - whole) * bytes_in);
  convert(padded, step, out + whole * bytes_out);
}

void store_sums(const MatmulProblem &problem, const Sums &sums) {
  with_dtype(problem.dtype, [&](auto type) {
    using T = decltype(type);
    const T *bias = static_cast<const T *>(problem.bias);
    const float *values = sums.values - sums.rows.begin;
    for (int64_t column = sums.columns.begin; column < sums.columns.end; ++column) {
      T *y = static_cast<T *>(problem.y) + column * problem.y_stride;
      for (int64_t row = sums.rows.begin; row < sums.rows.end; ++row)
        y[row] = from_float<T>(bias == nullptr ? values[row] : values[row] + to_float(bias[row]));
      values += sums.stride;
    }
  });
}

void matmul_vector(const MatmulSet &set, const MatmulProblem &problem, RowRange rows) {
  const bool in_bf16 = set.bf16 != nullptr && problem.dtype == NF4_DTYPE_BF16;
  const MatmulKernels &kernels = in_bf16 ? *set.bf16 : set.fp32;
  if (suits_dot(kernels, problem)) return matmul_dot(kernels, problem, rows);
  matmul_panel(set.dense, kernels, problem, rows);
}

}  // namespace nf4::cpu
