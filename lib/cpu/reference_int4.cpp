// The scalar reference of integer weights.
#include <algorithm>
#include <numeric>

#include "core/int4.hpp"
#include "core/round_int4.hpp"
#include "cpu/dtypes.hpp"
#include "cpu/reference.hpp"
#include "cpu/weight/int4.hpp"

namespace nf4::cpu {
namespace {

template <class T>
void dequant_rows(const Int4Weight &weight, T *out, RowRange n) {
  for (int64_t row = n.begin; row < n.end; ++row)
    for (int64_t k = 0; k < weight.cols; ++k)
      out[row * weight.cols + int4_column(weight, k)] =
          from_float<T>(int4_value_at(weight, row, k));
}

void store_code(uint32_t *words, Int4Place place, uint32_t code) {
  words[place.word] = (words[place.word] & ~(15u << place.shift)) | code << place.shift;
}

uint16_t round_scale(float scale, nf4_dtype dtype) {
  return int4_scale_bits(dtype == NF4_DTYPE_FP16 ? float_to_half(scale) : float_to_bf16(scale),
                         dtype);
}

// Quantizes a group of a row.
template <class T>
void quantize_group(const Int4QuantizeProblem &problem, const T *in, int64_t n, int64_t g) {
  const Int4Weight &weight = problem.weight;
  const T *x = in + n * weight.cols + g * weight.group_size;
  Int4Range range;
  for (int64_t i = 0; i < weight.group_size; ++i) range.add(to_float(x[i]));
  const int64_t index = int4_scale(weight.layout, weight.rows, weight.groups, n, g);
  static_cast<uint16_t *>(weight.scales)[index] =
      round_scale(int4_exact_scale(range, problem.symmetric), weight.scales_dtype);
  const float scale = int4_scale_at(weight, index);
  const uint32_t zero = int4_zero_of(range, problem.symmetric, scale);
  if (weight.zeros != nullptr)
    store_code(weight.zeros, int4_zero(weight.layout, weight.rows, weight.groups, n, g), zero);
  for (int64_t i = 0; i < weight.group_size; ++i)
    store_code(weight.packed,
               int4_code(weight.layout, weight.rows, weight.cols, n, g * weight.group_size + i),
               int4_encode(to_float(x[i]), scale, zero));
}

// Clears the words of rows that begin at a multiple of 8, before their codes are stored.
void clear_words(const Int4Weight &weight, RowRange n) {
  for (int64_t row = n.begin; row < n.end; ++row)
    for (int64_t k = 0; k < weight.cols; ++k)
      weight.packed[int4_code(weight.layout, weight.rows, weight.cols, row, k).word] = 0;
  if (weight.zeros == nullptr) return;
  for (int64_t row = n.begin; row < n.end; ++row)
    for (int64_t g = 0; g < weight.groups; ++g)
      weight.zeros[int4_zero(weight.layout, weight.rows, weight.groups, row, g).word] = 0;
}

// Turns zeros into their stored form, for rows that begin at a multiple of 8.
void offset_zeros(const Int4Weight &weight, RowRange n) {
  if (weight.zeros == nullptr) return;
  for (int64_t row = n.begin; row < n.end; row += kInt4PerWord)
    for (int64_t g = 0; g < weight.groups; ++g)
      weight.zeros[int4_zero(weight.layout, weight.rows, weight.groups, row, g).word] -=
          weight.zero_offset * kInt4Ones;
}

template <class T>
void matmul_rows(const Int4MatmulProblem &problem, RowRange rows) {
  const Int4Weight &weight = problem.weight;
  const T *x = static_cast<const T *>(problem.x);
  const T *bias = static_cast<const T *>(problem.bias);
  T *y = static_cast<T *>(problem.y);
  const Group &group = *problem.group;
  for (int64_t row = rows.begin; row < rows.end; ++row)
    for (int64_t i = 0; i < problem.m; ++i) {
      double sum = bias == nullptr ? 0.0 : static_cast<double>(to_float(bias[row]));
      const T *x_row = x + group.row_of_x(i) * problem.x_stride;
      for (int64_t k = 0; k < weight.cols && group.has_x(i); ++k)
        sum += static_cast<double>(int4_value_at(weight, row, k)) *
               static_cast<double>(to_float(x_row[int4_column(weight, k)]));
      if (group.row_scale != nullptr) sum *= static_cast<double>(group.row_scale[i]);
      y[i * problem.y_stride + row] = from_float<T>(static_cast<float>(sum));
    }
}

}  // namespace

void int4_dequant_reference(const Int4DequantProblem &problem, RowRange n) {
  with_dtype(problem.dtype, [&](auto type) {
    dequant_rows(problem.weight, static_cast<decltype(type) *>(problem.out), n);
  });
}

void int4_quantize_reference(const Int4QuantizeProblem &problem, RowRange n) {
  clear_words(problem.weight, n);
  with_dtype(problem.dtype, [&](auto type) {
    for (int64_t row = n.begin; row < n.end; ++row)
      for (int64_t g = 0; g < problem.weight.groups; ++g)
        quantize_group(problem, static_cast<const decltype(type) *>(problem.in), row, g);
  });
  offset_zeros(problem.weight, n);
}

void int4_matmul_reference(const Int4MatmulProblem &problem, RowRange n) {
  with_dtype(problem.dtype, [&](auto type) { matmul_rows<decltype(type)>(problem, n); });
}

void int4_permutation(const Int4ReorderProblem &problem) {
  int32_t *const begin = problem.permutation, *const end = begin + problem.from.cols;
  std::iota(begin, end, 0);
  const int32_t *const g_idx = problem.from.g_idx;
  std::sort(begin, end, [g_idx](int32_t a, int32_t b) {
    return g_idx[a] != g_idx[b] ? g_idx[a] < g_idx[b] : a < b;
  });
}

void int4_reorder_reference(const Int4ReorderProblem &problem, RowRange n) {
  const Int4Weight &weight = problem.from;
  Int4Weight to = weight;
  to.packed = problem.packed;
  to.zeros = nullptr;
  clear_words(to, n);
  for (int64_t row = n.begin; row < n.end; ++row)
    for (int64_t k = 0; k < weight.cols; ++k)
      store_code(problem.packed, int4_code(weight.layout, weight.rows, weight.cols, row, k),
                 unpack_int4(weight.packed, int4_code(weight.layout, weight.rows, weight.cols, row,
                                                      problem.permutation[k])));
}

}  // namespace nf4::cpu
