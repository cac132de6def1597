// A correct call of each function that works on a weight, to be made wrong.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "nf4/nf4.h"
#include "support/guarded.hpp"

namespace nf4::test {

constexpr int64_t kRows = 3;
constexpr int64_t kCols = 97;    // 291 elements, 5 blocks of 64, the last partial
constexpr int64_t kColumns = 2;  // m of matmul
constexpr size_t kDenseBytes = kRows * kCols * 4;
constexpr size_t kPackedBytes = (kRows * kCols + 1) / 2;

struct Call {
  GuardedBuffer packed{kPackedBytes, Edge::kStart, 0};
  GuardedBuffer absmax{5 * 4, Edge::kStart, 0};
  GuardedBuffer nested_absmax{3 * 4, Edge::kStart, 0};
  GuardedBuffer nested_code{256 * 4, Edge::kStart, 0};
  GuardedBuffer nested_offset{4, Edge::kStart, 0};
  GuardedBuffer codebook{16 * 4, Edge::kStart, 0};
  GuardedBuffer dense_buffer{kDenseBytes + 16, Edge::kStart, 0};
  GuardedBuffer workspace_buffer{64, Edge::kStart, 0};

  nf4_tensor tensor{};
  const nf4_tensor *weight = &tensor;
  void *dense = dense_buffer.data();  // out of dequantize, in of quantize
  nf4_dtype dtype = NF4_DTYPE_FP32;
  void *workspace = workspace_buffer.data();
  size_t workspace_bytes = 64;
  int32_t threads = 1;

  GuardedBuffer x_buffer{kColumns * kCols * 4, Edge::kStart, 0};
  GuardedBuffer bias_buffer{kRows * 4, Edge::kStart, 0};
  GuardedBuffer y_buffer{kColumns * kRows * 4 + 16, Edge::kStart, 0};
  nf4_matmul_args args{};
  const nf4_matmul_args *matmul = &args;

  explicit Call(bool nested) {
    tensor.struct_size = sizeof tensor;
    tensor.format = NF4_FORMAT_NF4;
    tensor.blocksize = 64;
    tensor.nested_blocksize = nested ? 2 : 0;
    tensor.rows = kRows;
    tensor.cols = kCols;
    tensor.packed = packed.data();
    tensor.absmax = absmax.data();
    args.struct_size = sizeof args;
    args.dtype = NF4_DTYPE_BF16;
    args.m = kColumns;
    args.x = x_buffer.data();
    args.x_stride = kCols;
    args.bias = bias_buffer.data();
    args.y = y_buffer.data();
    args.y_stride = kRows;
    if (!nested) return;
    tensor.nested_absmax = floats(nested_absmax);
    tensor.nested_code = floats(nested_code);
    tensor.nested_offset = floats(nested_offset);
    std::memcpy(nested_code.data(), nf4_scale_code(), 256 * 4);
  }
  Call(const Call &) = delete;
  Call &operator=(const Call &) = delete;

  static float *floats(const GuardedBuffer &buffer) {
    return reinterpret_cast<float *>(buffer.data());
  }

  bool untouched() const {
    for (const GuardedBuffer *buffer :
         {&packed, &absmax, &nested_absmax, &nested_offset, &dense_buffer, &workspace_buffer,
          &x_buffer, &bias_buffer, &y_buffer})
      if (!buffer->untouched()) return false;
    return true;
  }
};

// A function, and how it is called.
enum class Work { kDequant, kQuantize, kMatmul };
struct Function {
  const char *name;
  Work work;
  bool launches;
  nf4_status (*call)(const Call &);
};
const std::vector<Function> &functions();

// Which functions an argument is one of.
enum class Who { kAll, kCpu, kDequant, kQuantize, kMatmul, kMatmulLaunch };

// One way to break a call, and what the detail must say.
struct BadArgument {
  const char *what;
  Who who;
  bool nested;
  std::function<void(Call &)> change;
  std::vector<std::string> named;
};

template <class T>
T *moved(T *pointer, int bytes) {
  return reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(pointer) + bytes);
}

// Every function that an argument concerns answers INVALID_ARGUMENT, names it, and writes nothing.
void check_bad_arguments(const std::vector<BadArgument> &table);

}  // namespace nf4::test
