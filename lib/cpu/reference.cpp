#include "cpu/reference.hpp"

#include <algorithm>

#include "core/encode.hpp"
#include "core/encode_e2m1.hpp"
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
      out[i] = from_float<T>(
          multiply_rn(entries[unpack_code(weight.packed, i, weight.low_nibble_first())], scale));
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

// The scale byte of a block of MXFP4 or NVFP4.
uint8_t encode_scale_byte(const Weight &weight, int64_t block, float absmax) {
  if (weight.scale_bytes == ScaleBytes::kE8M0)
    return static_cast<uint8_t>(e8m0_scale(absmax, weight.scale_rule));
  return static_cast<uint8_t>(e4m3_scale(absmax, weight.nested_absmax[block / weight.global_blocks],
                                         weight.global_divides()));
}

template <class T>
void quantize_e2m1_block(const Weight &weight, const T *in, int64_t block) {
  in += block * weight.blocksize();
  float absmax = 0;
  for (int64_t i = 0; i < weight.blocksize(); ++i)
    absmax = std::max(absmax, finite_magnitude(to_float(in[i])));
  static_cast<uint8_t *>(weight.absmax)[block] = encode_scale_byte(weight, block, absmax);
  const float scale = block_scale(weight, block);
  uint8_t *packed = weight.packed + block * weight.blocksize() / 2;
  for (int64_t i = 0; i < weight.blocksize(); i += 2) {
    const uint32_t even = e2m1_code(divide_rn(to_float(in[i]), scale));
    const uint32_t odd = e2m1_code(divide_rn(to_float(in[i + 1]), scale));
    packed[i / 2] = pack_codes(odd, even);
  }
}

double entry_times_scale(const Weight &weight, const float *entries, int64_t element) {
  const double value = entries[unpack_code(weight.packed, element, weight.low_nibble_first())];
  return value * block_scale(weight, element >> weight.blocksize_log2);
}

double read_float(nf4_dtype dtype, const void *data, int64_t i) {
  double value = 0;
  with_dtype(dtype,
             [&](auto type) { value = to_float(static_cast<const decltype(type) *>(data)[i]); });
  return value;
}

// The adapter's term for row i of x and column `column` of y.
double lora_term(const MatmulProblem &problem, int64_t i, int64_t column) {
  const Lora &lora = problem.lora;
  double sum = 0;
  for (int64_t r = 0; r < lora.rank; ++r) {
    const double factor = problem.gradient
                              ? read_float(lora.dtype, lora.a, r * lora.a_stride + column)
                              : read_float(lora.dtype, lora.b, column * lora.b_stride + r);
    sum += read_float(problem.dtype, lora.product, i * lora.rank + r) * factor;
  }
  return lora.rank == 0 ? 0 : sum * static_cast<double>(lora.scale);
}

template <class T>
void matmul_rows(const MatmulProblem &problem, RowRange rows) {
  const Weight &weight = problem.weight;
  const float *entries = codebook(weight);
  const T *x = static_cast<const T *>(problem.x);
  const T *bias = static_cast<const T *>(problem.bias);
  T *y = static_cast<T *>(problem.y);
  const Group &group = *problem.group;
  for (int64_t row = rows.begin; row < rows.end; ++row)
    for (int64_t i = 0; i < problem.m; ++i) {
      double sum = bias == nullptr ? 0.0 : static_cast<double>(to_float(bias[row]));
      const T *x_row = x + group.row_of_x(i) * problem.x_stride;
      for (int64_t k = 0; k < weight.cols && group.has_x(i); ++k)
        sum += entry_times_scale(weight, entries, row * weight.cols + k) *
               static_cast<double>(to_float(x_row[k]));
      sum += lora_term(problem, i, row);
      if (group.row_scale != nullptr) sum *= static_cast<double>(group.row_scale[i]);
      y[i * problem.y_stride + row] = from_float<T>(static_cast<float>(sum));
    }
}

template <class T>
void matmul_grad_columns(const MatmulProblem &problem, RowRange columns) {
  const Weight &weight = problem.weight;
  const float *entries = codebook(weight);
  const T *dy = static_cast<const T *>(problem.x);
  T *dx = static_cast<T *>(problem.y);
  const Group &group = *problem.group;
  for (int64_t i = 0; i < problem.m; ++i)
    for (int64_t k = columns.begin; k < columns.end; ++k) {
      double sum = 0;
      const T *dy_row = dy + group.row_of_x(i) * problem.x_stride;
      for (int64_t n = 0; n < weight.rows && group.has_x(i); ++n)
        sum += entry_times_scale(weight, entries, (group.first_row + n) * weight.cols + k) *
               static_cast<double>(to_float(dy_row[n]));
      sum += lora_term(problem, i, k);
      if (group.row_scale != nullptr) sum *= static_cast<double>(group.row_scale[i]);
      dx[i * problem.y_stride + k] = from_float<T>(static_cast<float>(sum));
    }
}

template <class T>
void lora_product_rows(const MatmulProblem &problem, RowRange m) {
  const Lora &lora = problem.lora;
  const T *x = static_cast<const T *>(problem.x);
  T *product = static_cast<T *>(lora.product);
  for (int64_t i = m.begin; i < m.end; ++i)
    for (int64_t r = 0; r < lora.rank; ++r) {
      double sum = 0;
      for (int64_t j = 0; j < problem.x_columns(); ++j) {
        const double factor = problem.gradient
                                  ? read_float(lora.dtype, lora.b, j * lora.b_stride + r)
                                  : read_float(lora.dtype, lora.a, r * lora.a_stride + j);
        sum += static_cast<double>(to_float(x[i * problem.x_stride + j])) * factor;
      }
      product[i * lora.rank + r] = from_float<T>(static_cast<float>(sum));
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

void quantize_e2m1(const QuantizeProblem &problem, BlockRange blocks) {
  with_dtype(problem.dtype, [&](auto type) {
    for (int64_t block = blocks.begin; block < blocks.end; ++block)
      quantize_e2m1_block(problem.weight, static_cast<const decltype(type) *>(problem.in), block);
  });
}

void matmul_reference(const MatmulProblem &problem, const RoundedCodebook &, RowRange rows) {
  with_dtype(problem.dtype, [&](auto type) { matmul_rows<decltype(type)>(problem, rows); });
}

void matmul_grad_reference(const MatmulProblem &problem, RowRange k) {
  with_dtype(problem.dtype, [&](auto type) { matmul_grad_columns<decltype(type)>(problem, k); });
}

void lora_product_reference(const MatmulProblem &problem, RowRange m) {
  with_dtype(problem.dtype, [&](auto type) { lora_product_rows<decltype(type)>(problem, m); });
}

void lora_grad_reference(const LoraGradPart &part, RowRange columns) {
  const LoraGradProblem &problem = part.problem;
  with_dtype(problem.grad_dtype, [&](auto type) {
    auto *out = static_cast<decltype(type) *>(part.of.out);
    for (int64_t r = 0; r < problem.rank; ++r)
      for (int64_t column = columns.begin; column < columns.end; ++column) {
        double sum = 0;
        for (int64_t i = 0; i < problem.m; ++i)
          sum += read_float(problem.dtype, part.of.left, i * problem.rank + r) *
                 read_float(problem.dtype, part.of.right, i * part.of.right_stride + column);
        out[part.at(r, column)] = from_float<decltype(type)>(
            static_cast<float>(sum * static_cast<double>(problem.scale)));
      }
  });
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
