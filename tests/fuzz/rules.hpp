// The shapes that nf4.h calls valid, and the bytes of their parts, written once more: in
// numbers that cannot overflow, and without the library's code.
#pragma once

#include <cmath>
#include <cstddef>

#include "input.hpp"
#include "nf4/nf4.h"

namespace nf4::fuzz {

constexpr Wide kMost = static_cast<Wide>(1) << 60;

// For invalid sizes: also wrong, and not so large that arithmetic with it overflows.
inline Wide bounded(Wide n) {
  constexpr Wide kBound = static_cast<Wide>(1) << 64;
  return n > kBound ? kBound : n < 0 ? 0 : n;
}
inline Wide ceil_div(Wide a, Wide b) { return b > 0 && a >= 0 ? (a + b - 1) / b : 0; }
inline Wide item_bytes(nf4_dtype dtype) { return dtype == NF4_DTYPE_FP32 ? 4 : 2; }
// From the first element to the last.
inline Wide matrix_elements(Wide rows, Wide stride, Wide columns) {
  return rows <= 0 ? 0 : bounded((rows - 1) * stride + columns);
}

inline bool valid_dtype(nf4_dtype dtype) { return dtype >= 1 && dtype <= 3; }
inline bool valid_sizes(int64_t rows, int64_t cols) {
  return rows >= 0 && cols >= 0 && static_cast<Wide>(rows) * cols <= kMost;
}
inline bool valid_stride(int64_t rows, int64_t stride, int64_t columns) {
  return stride >= columns && static_cast<Wide>(rows) * stride <= kMost;
}

inline bool has_scale_bytes(const nf4_tensor &w) {
  return w.format == NF4_FORMAT_MXFP4 || w.format == NF4_FORMAT_NVFP4;
}

// MXFP4 and NVFP4.
inline bool valid_e2m1(const nf4_tensor &w) {
  if (w.struct_size != sizeof w || !valid_sizes(w.rows, w.cols)) return false;
  if (w.format == NF4_FORMAT_MXFP4)
    return w.blocksize == 32 && w.nested_blocksize == 0 && w.scale_rule >= 0 && w.scale_rule <= 2 &&
           w.cols % 32 == 0;
  return (w.blocksize == 16 || w.blocksize == 32) && w.nested_blocksize >= 0 && w.scale_rule >= 0 &&
         w.scale_rule <= 1 && w.cols % w.blocksize == 0;
}

inline bool valid(const nf4_tensor &w) {
  if (has_scale_bytes(w)) return valid_e2m1(w);
  bool format = w.format == NF4_FORMAT_NF4 || w.format == NF4_FORMAT_FP4;
#ifdef NF4_TEST_FORMAT
  format = format || w.format == NF4_TEST_FORMAT;
#endif
  const auto power_of_two = [](int64_t n) { return n > 0 && (n & (n - 1)) == 0; };
  return w.struct_size == sizeof w && format && power_of_two(w.blocksize) && w.blocksize >= 32 &&
         w.blocksize <= 4096 && (w.nested_blocksize == 0 || power_of_two(w.nested_blocksize)) &&
         w.scale_rule == 0 && valid_sizes(w.rows, w.cols);
}

inline bool valid(const nf4_int4_tensor &w) {
  if (w.struct_size != sizeof w || w.layout < 1 || w.layout > 3) return false;
  if (w.scales_dtype != NF4_DTYPE_FP16 && w.scales_dtype != NF4_DTYPE_BF16) return false;
  if (!valid_sizes(w.rows, w.cols)) return false;
  const bool divides = w.group_size > 0 && w.group_size % 8 == 0 && w.cols % w.group_size == 0;
  if (w.group_size != -1 && !divides) return false;
  if (w.zero_offset != 0 && !(w.zero_offset == 1 && w.layout == NF4_INT4_GPTQ)) return false;
  if (w.layout == NF4_INT4_GPTQ && w.cols % 8 != 0) return false;
  return w.layout != NF4_INT4_AWQ || w.rows % 8 == 0;
}

// For an invalid tensor they may be anything.
inline Wide elements(const nf4_tensor &w) { return bounded(static_cast<Wide>(w.rows) * w.cols); }
inline Wide elements(const nf4_int4_tensor &w) {
  return bounded(static_cast<Wide>(w.rows) * w.cols);
}
inline Wide blocks(const nf4_tensor &w) { return ceil_div(elements(w), w.blocksize); }
inline Wide groups(const nf4_int4_tensor &w) {
  if (w.group_size == -1) return w.cols == 0 ? 0 : 1;
  return w.group_size == 0 ? 0 : w.cols / w.group_size;
}
inline Wide packed_bytes(const nf4_tensor &w) { return (elements(w) + 1) / 2; }
inline Wide packed_bytes(const nf4_int4_tensor &w) {
  switch (w.layout) {
    case NF4_INT4_GPTQ:
      return bounded(static_cast<Wide>(w.cols / 8) * w.rows) * 4;
    case NF4_INT4_AWQ:
      return bounded(static_cast<Wide>(w.rows / 8) * w.cols) * 4;
    default:
      return bounded(ceil_div(w.cols, 8) * w.rows) * 4;
  }
}
inline Wide zeros_bytes(const nf4_int4_tensor &w) {
  return bounded(ceil_div(w.rows, 8) * groups(w)) * 4;
}

inline bool has_lora(const nf4_matmul_args &args) {
  return args.struct_size == sizeof args && args.lora != nullptr;
}

inline bool valid_lora(const nf4_tensor &w, const nf4_matmul_args &args) {
  constexpr int64_t kMostOfSize = int64_t{1} << 53;
  const nf4_lora &lora = *args.lora;
  return lora.struct_size == sizeof lora &&
         (lora.dtype == NF4_DTYPE_FP32 || lora.dtype == args.dtype) && lora.rank >= 1 &&
         lora.rank <= 128 && std::isfinite(lora.scale) && lora.reserved == 0 &&
         valid_stride(lora.rank, lora.a_stride, w.cols) &&
         valid_stride(w.rows, lora.b_stride, lora.rank) && args.m <= kMostOfSize &&
         w.rows <= kMostOfSize && w.cols <= kMostOfSize;
}
inline bool valid_lora(const nf4_int4_tensor &, const nf4_matmul_args &) { return false; }

// For args of a valid weight; all but the pointers.
template <class Tensor>
bool valid(const Tensor &w, const nf4_matmul_args &args, bool gradient) {
  const size_t before_lora = offsetof(nf4_matmul_args, lora);
  if (args.struct_size != sizeof args && args.struct_size != before_lora) return false;
  return valid_dtype(args.dtype) && args.reserved == 0 && args.m >= 0 &&
         valid_stride(args.m, args.x_stride, gradient ? w.rows : w.cols) &&
         valid_stride(args.m, args.y_stride, gradient ? w.cols : w.rows) &&
         (!has_lora(args) || valid_lora(w, args));
}

// The gradients that are wanted.
inline bool has_da(const nf4_lora_grad_args &args) { return args.da != nullptr && args.cols != 0; }
inline bool has_db(const nf4_lora_grad_args &args) { return args.db != nullptr && args.rows != 0; }
inline bool valid(const nf4_lora_grad_args &args) {
  return args.struct_size == sizeof args && valid_dtype(args.dtype) &&
         (args.grad_dtype == NF4_DTYPE_FP32 || args.grad_dtype == args.dtype) && args.rank >= 1 &&
         args.rank <= 128 && std::isfinite(args.scale) && args.m >= 0 && args.rows >= 0 &&
         args.cols >= 0 &&
         (!has_da(args) || (valid_stride(args.m, args.x_stride, args.cols) &&
                            valid_stride(args.m, args.rank, args.rank) &&
                            valid_stride(args.rank, args.da_stride, args.cols))) &&
         (!has_db(args) || (valid_stride(args.m, args.dy_stride, args.rows) &&
                            valid_stride(args.m, args.rank, args.rank) &&
                            valid_stride(args.rows, args.db_stride, args.rank)));
}

inline bool valid_experts(const nf4_tensor &w, int32_t experts) {
  if (experts <= 0) return experts == 0 && w.rows == 0;
  return w.rows % experts == 0 && (experts == 1 || elements(w) / experts % w.blocksize == 0);
}
inline bool valid_experts(const nf4_int4_tensor &w, int32_t experts) {
  return experts >= 0 && elements(w) * experts <= kMost;
}
inline int64_t expert_rows(const nf4_tensor &w, int32_t experts) {
  return experts > 0 ? w.rows / experts : 0;
}
inline int64_t expert_rows(const nf4_int4_tensor &w, int32_t) { return w.rows; }

template <class Tensor>
bool valid(const Tensor &w, const nf4_grouped_args &args, bool gradient) {
  if (args.struct_size != sizeof args || !valid_dtype(args.dtype)) return false;
  if (!valid_experts(w, args.experts)) return false;
  const int64_t rows = expert_rows(w, args.experts);
  return args.m >= 0 && args.m <= INT32_MAX && args.x_rows >= 0 &&
         (args.x_index != nullptr || args.x_rows >= args.m) &&
         valid_stride(args.x_rows, args.x_stride, gradient ? rows : w.cols) &&
         valid_stride(args.m, args.y_stride, gradient ? w.cols : rows) &&
         (args.bias == nullptr ||
          (!gradient && valid_stride(args.experts, args.bias_stride, rows)));
}

}  // namespace nf4::fuzz
