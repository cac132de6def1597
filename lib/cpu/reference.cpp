#include "cpu/reference.hpp"

#include <algorithm>

#include "core/encode.hpp"
#include "cpu/dtypes.hpp"
#include "cpu/weight/scales.hpp"

namespace nf4::cpu {
namespace {

template <class T>
void dequant_blocks(const Weight &weight, T *out, BlockRange blocks) {
  const float *entries = codebook(weight);
  for (int64_t block = blocks.begin; block < blocks.end; ++block) {
    const float scale = block_scale(weight, block);
    const int64_t first = block * weight.blocksize();
    const int64_t last = std::min(first + weight.blocksize(), weight.elements);
    for (int64_t i = first; i < last; ++i)
      out[i] = from_float<T>(multiply_rn(entries[unpack_code(weight.packed, i)], scale));
  }
}

template <class T>
float quantize_block(const Weight &weight, const Quantizer &quantizer, const T *in, int64_t first,
                     int64_t last) {
  float absmax = 0;
  for (int64_t i = first; i < last; ++i)
    absmax = std::max(absmax, finite_magnitude(to_float(in[i])));
  const float inverse = inverse_scale(absmax);
  for (int64_t i = first; i < last; i += 2) {
    const uint32_t even = encode(quantizer, to_float(in[i]), inverse);
    const uint32_t odd = i + 1 < last ? encode(quantizer, to_float(in[i + 1]), inverse) : 0;
    weight.packed[i / 2] = pack_codes(even, odd);
  }
  return absmax;
}

template <class T>
void matmul_rows(const MatmulProblem &problem, RowRange rows) {
  const Weight &weight = problem.weight;
  const float *entries = codebook(weight);
  const T *x = static_cast<const T *>(problem.x);
  const T *bias = static_cast<const T *>(problem.bias);
  T *y = static_cast<T *>(problem.y);
  for (int64_t row = rows.begin; row < rows.end; ++row)
    for (int64_t i = 0; i < problem.m; ++i) {
      double sum = bias == nullptr ? 0.0 : static_cast<double>(to_float(bias[row]));
      for (int64_t k = 0; k < weight.cols; ++k) {
        const int64_t element = row * weight.cols + k;
        const double value = entries[unpack_code(weight.packed, element)];
        sum += value * block_scale(weight, element >> weight.blocksize_log2) *
               static_cast<double>(to_float(x[i * problem.x_stride + k]));
      }
      y[i * problem.y_stride + row] = from_float<T>(static_cast<float>(sum));
    }
}

template <class T>
double sum_of_tree(const T *values, int64_t count) {
  if (count == 0) return 0;
  if (count == 1) return values[0];
  int64_t half = 1;
  while (half * 2 < count) half *= 2;
  return sum_of_tree(values, half) + sum_of_tree(values + half, count - half);
}

}  // namespace

void dequant_reference(const DequantProblem &problem, BlockRange blocks) {
  with_dtype(problem.dtype, [&](auto type) {
    dequant_blocks(problem.weight, static_cast<decltype(type) *>(problem.out), blocks);
  });
}

void quantize_reference(const QuantizeProblem &problem, float *absmax, BlockRange blocks) {
  const Weight &weight = problem.weight;
  const Quantizer quantizer = make_quantizer(codebook(weight));
  with_dtype(problem.dtype, [&](auto type) {
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      const int64_t first = block * weight.blocksize();
      const int64_t last = std::min(first + weight.blocksize(), weight.elements);
      absmax[block] = quantize_block(weight, quantizer,
                                     static_cast<const decltype(type) *>(problem.in), first, last);
    }
  });
}

void matmul_reference(const MatmulProblem &problem, const RoundedCodebook &, RowRange rows) {
  with_dtype(problem.dtype, [&](auto type) { matmul_rows<decltype(type)>(problem, rows); });
}

double tree_sum(const float *values, int64_t count) { return sum_of_tree(values, count); }
double tree_sum(const double *values, int64_t count) { return sum_of_tree(values, count); }

void quantize_scales_reference(const Weight &weight, const float *scales, double *, int) {
  const float offset =
      static_cast<float>(tree_sum(scales, weight.blocks) / static_cast<double>(weight.blocks));
  *weight.nested_offset = offset;
  uint8_t *codes = static_cast<uint8_t *>(weight.absmax);
  for (int64_t nested = 0; nested < weight.nested_blocks; ++nested) {
    const int64_t first = nested << weight.nested_blocksize_log2;
    const int64_t last = std::min(first + weight.nested_blocksize(), weight.blocks);
    float absmax = 0;
    for (int64_t i = first; i < last; ++i)
      absmax = std::max(absmax, finite_magnitude(add_rn(scales[i], -offset)));
    weight.nested_absmax[nested] = absmax;
    const float inverse = inverse_scale(absmax);
    for (int64_t i = first; i < last; ++i)
      codes[i] = encode_scale(weight.nested_code, normalise(add_rn(scales[i], -offset), inverse));
  }
}

}  // namespace nf4::cpu
