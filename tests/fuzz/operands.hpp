// Descriptors and args structs from the bytes of a fuzzer.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>

#include "input.hpp"
#include "nf4/nf4.h"
#include "rules.hpp"

namespace nf4::fuzz {

constexpr nf4_dtype kDtypes[] = {NF4_DTYPE_FP32, NF4_DTYPE_FP16, NF4_DTYPE_BF16};

// A copy of a struct that has just the bytes of its struct_size, if that is one of those known.
template <class T>
std::unique_ptr<T, decltype(&std::free)> exact(const T &value, size_t bytes) {
  auto *const copy = static_cast<T *>(std::malloc(bytes));
  std::memcpy(copy, &value, bytes);
  return {copy, std::free};
}

inline void read_e2m1_shape(Input &in, nf4_tensor &w) {
  const bool nvfp4 = w.format == NF4_FORMAT_NVFP4;
  w.blocksize = in.number32(nvfp4 ? 16 << in.below(2) : 32);
  w.nested_blocksize = in.number32(nvfp4 ? in.below(8) : 0);
  w.scale_rule = in.number32(in.below(nvfp4 ? 2 : 3));
  w.rows = in.number(in.below(48));
  w.cols = in.number(32 * in.below(6));
}

inline void read_shape(Input &in, nf4_tensor &w) {
  w.struct_size = static_cast<size_t>(in.number(sizeof w));
  const int format = in.below(8);
  w.format = in.number32(format < 6 ? 1 + format % 2 : 3 + format % 2);
  if (has_scale_bytes(w)) return read_e2m1_shape(in, w);
  w.blocksize = in.number32(32 << in.below(3));
  w.nested_blocksize = in.number32(in.below(2) == 0 ? 0 : 1 << in.below(4));
  w.scale_rule = in.number32(0);
  w.rows = in.number(in.below(48));
  w.cols = in.number(in.below(160));
}

inline void read_parts(Input &in, Memory &memory, nf4_tensor &w, int32_t) {
  const bool nested = w.nested_blocksize != 0;
  w.packed = memory.part(packed_bytes(w), 1);
  if (has_scale_bytes(w)) {
    w.absmax = memory.part(blocks(w), 1);
    const Wide parts = w.nested_blocksize > 0 ? ceil_div(w.rows, w.nested_blocksize) : 1;
    if (w.format == NF4_FORMAT_NVFP4) w.nested_absmax = memory.array<float>(parts);
    return;
  }
  w.absmax = memory.part(blocks(w) * (nested ? 1 : 4), nested ? 1 : 4);
  if (nested) {
    w.nested_absmax = memory.array<float>(ceil_div(blocks(w), w.nested_blocksize));
    w.nested_code = memory.array<float>(256);
    w.nested_offset = memory.array<float>(1);
  }
  if (in.below(4) == 3) w.codebook = memory.array<float>(16);
}

inline void read_shape(Input &in, nf4_int4_tensor &w) {
  w.struct_size = static_cast<size_t>(in.number(sizeof w));
  w.layout = in.number32(1 + in.below(3));
  w.scales_dtype = in.number32(NF4_DTYPE_FP16 + in.below(2));
  const int groups = 1 + in.below(4), size = 8 * (1 + in.below(5));
  w.group_size = in.number32(in.below(3) == 2 ? -1 : size);
  w.zero_offset = in.number32(w.layout == NF4_INT4_GPTQ ? in.below(2) : 0);
  w.rows = in.number(w.layout == NF4_INT4_AWQ ? 8 * in.below(6) : in.below(48));
  w.cols = in.number(groups * size);
}

inline void read_parts(Input &in, Memory &memory, nf4_int4_tensor &w, int32_t experts) {
  const Wide of = experts < 1 ? 1 : experts;
  w.packed = memory.part(of * packed_bytes(w), 4);
  w.scales = memory.part(of * bounded(groups(w) * w.rows) * 2, 2);
  const int kind = in.below(8);
  if (kind < 6 || w.zero_offset != 0) w.zeros = memory.part(of * zeros_bytes(w), 4);
  const auto indices = [&](int64_t count) {
    auto *const values = memory.array<int32_t>(of * w.cols);
    if (memory.real() && values != nullptr)
      for (int64_t i = 0; i < of * w.cols; ++i) {
        const auto index =
            static_cast<int32_t>((w.cols - 1 - i % w.cols) % (count > 0 ? count : 1));
        std::memcpy(values + i, &index, sizeof index);
      }
    // Functions on the CPU refuse values out of range.
    if (in.below(8) == 7 && w.cols > 0 && values != nullptr && memory.real()) {
      const int32_t wrong = in.number32(in.byte());
      std::memcpy(values + in.below(256) % (of * w.cols), &wrong, sizeof wrong);
      memory.set_unusual();
    }
    return values;
  };
  if (kind == 4) w.g_idx = indices(static_cast<int64_t>(groups(w)));
  if (kind == 5) w.permutation = indices(w.cols);
}

inline float read_scale(Input &in) {
  const int scale = in.byte();
  return scale == 255 ? INFINITY : scale == 254 ? NAN : static_cast<float>(scale) / 8;
}

inline void read_lora(Input &in, Memory &memory, const nf4_tensor &w, const nf4_matmul_args &args,
                      nf4_lora &lora) {
  lora.struct_size = static_cast<size_t>(in.number(sizeof lora));
  lora.dtype = in.number32(in.below(2) == 0 ? args.dtype : NF4_DTYPE_FP32);
  lora.rank = in.number32(1 + in.below(20));
  lora.scale = read_scale(in);
  lora.reserved = in.number32(0);
  lora.a_stride = in.number(w.cols);
  lora.b_stride = in.number(lora.rank);
  const Wide item = item_bytes(lora.dtype);
  const int alignment = static_cast<int>(item);
  lora.a = memory.part(matrix_elements(lora.rank, lora.a_stride, w.cols) * item, alignment);
  lora.b = memory.part(matrix_elements(w.rows, lora.b_stride, lora.rank) * item, alignment);
  const Wide of_x = item_bytes(args.dtype);
  lora.product = memory.part(static_cast<Wide>(args.m) * lora.rank * of_x, static_cast<int>(of_x));
}

inline nf4_lora_grad_args read_lora_grad(Input &in, Memory &memory) {
  nf4_lora_grad_args args{};
  args.struct_size = static_cast<size_t>(in.number(sizeof args));
  args.dtype = in.number32(kDtypes[in.below(3)]);
  args.grad_dtype = in.number32(in.below(2) == 0 ? args.dtype : NF4_DTYPE_FP32);
  args.rank = in.number32(1 + in.below(20));
  args.scale = read_scale(in);
  args.m = in.number(in.below(20));
  args.rows = in.number(in.below(160));
  args.cols = in.number(in.below(160));
  args.x_stride = in.number(args.cols);
  args.dy_stride = in.number(args.rows);
  args.da_stride = in.number(args.cols);
  args.db_stride = in.number(args.rank);
  const auto matrix = [&](nf4_dtype dtype, int64_t rows, int64_t stride, int64_t columns) {
    const Wide item = item_bytes(dtype);
    return memory.part(matrix_elements(rows, stride, columns) * item, static_cast<int>(item));
  };
  args.x = matrix(args.dtype, args.m, args.x_stride, args.cols);
  args.dy = matrix(args.dtype, args.m, args.dy_stride, args.rows);
  args.p = matrix(args.dtype, args.m, args.rank, args.rank);
  args.q = matrix(args.dtype, args.m, args.rank, args.rank);
  const int wanted = in.below(4);
  if (wanted != 1) args.da = matrix(args.grad_dtype, args.rank, args.da_stride, args.cols);
  if (wanted != 2) args.db = matrix(args.grad_dtype, args.rows, args.db_stride, args.rank);
  return args;
}

// All but the lora, which is for the caller to add.
template <class Tensor>
nf4_matmul_args read_args(Input &in, Memory &memory, const Tensor &w, bool gradient) {
  const int64_t x_columns = gradient ? w.rows : w.cols, y_columns = gradient ? w.cols : w.rows;
  nf4_matmul_args args{};
  args.struct_size = static_cast<size_t>(in.number(sizeof args));
  args.dtype = in.number32(kDtypes[in.below(3)]);
  args.reserved = in.number32(0);
  args.m = in.number(in.below(20));
  args.x_stride = in.number(x_columns);
  args.y_stride = in.number(y_columns);
  const Wide item = item_bytes(args.dtype);
  const int alignment = static_cast<int>(item);
  args.x = memory.part(matrix_elements(args.m, args.x_stride, x_columns) * item, alignment);
  if (in.below(4) == 3 && !(gradient && !in.rarely()))
    args.bias = memory.part(static_cast<Wide>(w.rows) * item, alignment);
  args.y = memory.part(matrix_elements(args.m, args.y_stride, y_columns) * item, alignment);
  return args;
}

template <class Tensor>
nf4_grouped_args read_grouped(Input &in, Memory &memory, const Tensor &w, int32_t experts,
                              bool gradient) {
  const int64_t rows = expert_rows(w, experts);
  const int64_t x_columns = gradient ? rows : w.cols, y_columns = gradient ? w.cols : rows;
  nf4_grouped_args args{};
  args.struct_size = static_cast<size_t>(in.number(sizeof args));
  args.dtype = in.number32(kDtypes[in.below(3)]);
  args.experts = experts;
  args.m = in.number(in.below(20));
  const bool indexed = in.below(2) == 1;
  args.x_rows = in.number(indexed ? 1 + in.below(8) : args.m);
  args.x_stride = in.number(x_columns);
  args.y_stride = in.number(y_columns);
  args.bias_stride = in.number(rows);
  const Wide item = item_bytes(args.dtype);
  const int alignment = static_cast<int>(item);
  args.x = memory.part(matrix_elements(args.x_rows, args.x_stride, x_columns) * item, alignment);
  args.y = memory.part(matrix_elements(args.m, args.y_stride, y_columns) * item, alignment);
  auto *const ends = memory.array<int32_t>(experts);
  // Arbitrary, or ascending.
  if (memory.usual() && memory.real() && in.below(4) != 3)
    for (int32_t e = 0; e < experts; ++e)
      ends[e] = static_cast<int32_t>(static_cast<Wide>(args.m) * (e + 1) / experts);
  args.ends = ends;
  if (indexed) args.x_index = memory.array<int32_t>(args.m);
  if (in.below(4) == 3 && !(gradient && !in.rarely()))
    args.bias = memory.part(matrix_elements(experts, args.bias_stride, rows) * item, alignment);
  if (in.below(2) == 1) args.row_scale = memory.array<float>(args.m);
  return args;
}

}  // namespace nf4::fuzz
