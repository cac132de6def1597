// A correct call of each function that works on an integer weight, to be made wrong.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "nf4/nf4.h"
#include "support/guarded.hpp"

namespace nf4::test {

constexpr nf4_int4_layout kGptq = NF4_INT4_GPTQ, kAwq = NF4_INT4_AWQ,
                          kCompressed = NF4_INT4_COMPRESSED_TENSORS;
constexpr int64_t kInt4N = 16, kInt4K = 64, kInt4Groups = 2, kInt4M = 2;
constexpr size_t kInt4CodeBytes = kInt4N * kInt4K / 2;
constexpr size_t kInt4ScaleBytes = kInt4N * kInt4Groups * 2;
constexpr size_t kInt4OutBytes = kInt4N * kInt4K * 4;

// A right call of each function, to be made wrong.
struct Int4Call {
  GuardedBuffer packed{kInt4CodeBytes, Edge::kStart, 0};
  GuardedBuffer scales{kInt4ScaleBytes, Edge::kStart, 0};
  GuardedBuffer zeros{kInt4N * kInt4Groups / 2, Edge::kStart, 0};
  GuardedBuffer g_idx{kInt4K * 4, Edge::kStart, 0};
  GuardedBuffer permutation{kInt4K * 4, Edge::kStart, 0};
  GuardedBuffer reordered{kInt4CodeBytes, Edge::kStart, 0};
  GuardedBuffer dense{kInt4OutBytes + 16, Edge::kStart, 0};
  GuardedBuffer x{kInt4M * kInt4K * 4, Edge::kStart, 0};
  GuardedBuffer y{kInt4M * kInt4N * 4 + 16, Edge::kStart, 0};
  GuardedBuffer workspace{1 << 16, Edge::kStart, 0};

  nf4_int4_tensor tensor{};  // `from` of reorder, where it has g_idx
  nf4_int4_tensor to{};
  const nf4_int4_tensor *weight = &tensor;
  const nf4_int4_tensor *target = &to;
  bool with_g_idx = true;
  void *out = dense.data();  // out of dequantize, in of quantize
  nf4_dtype dtype = NF4_DTYPE_FP32;
  int32_t symmetric = 0;
  int32_t threads = 1;
  nf4_matmul_args args{};
  const nf4_matmul_args *matmul = &args;

  explicit Int4Call(nf4_int4_layout layout) {
    tensor.struct_size = sizeof tensor;
    tensor.layout = layout;
    tensor.scales_dtype = NF4_DTYPE_FP16;
    tensor.group_size = kInt4K / kInt4Groups;
    tensor.rows = kInt4N;
    tensor.cols = kInt4K;
    tensor.packed = packed.data();
    tensor.scales = scales.data();
    tensor.zeros = zeros.data();
    to = tensor;
    to.packed = reordered.data();
    to.permutation = integers(permutation);
    args.struct_size = sizeof args;
    args.dtype = NF4_DTYPE_BF16;
    args.m = kInt4M;
    args.x = x.data();
    args.x_stride = kInt4K;
    args.y = y.data();
    args.y_stride = kInt4N;
  }

  static int32_t *integers(const GuardedBuffer &buffer) {
    return reinterpret_cast<int32_t *>(buffer.data());
  }

  bool untouched() const {
    for (const GuardedBuffer *buffer :
         {&packed, &scales, &zeros, &g_idx, &permutation, &reordered, &dense, &x, &y, &workspace})
      if (!buffer->untouched()) return false;
    return true;
  }

  // What reorder reads.
  nf4_int4_tensor from() const {
    nf4_int4_tensor result = tensor;
    if (with_g_idx) result.g_idx = integers(g_idx);
    return result;
  }
};

// Which functions an argument is one of; with kLaunch, their launches alone.
enum Int4Work {
  kDequantize = 1,
  kQuantizing = 2,
  kMultiply = 4,
  kReorder = 8,
  kAny = 15,
  kLaunch = 16
};

struct Int4Function {
  const char *name;
  Int4Work work;
  bool launches;
  nf4_status (*call)(const Int4Call &);
};

const std::vector<Int4Function> &int4_functions();

// One way to break a call, and what the detail must say.
struct Int4Fault {
  const char *what;
  int who;  // of Int4Work
  nf4_int4_layout layout;
  std::function<void(Int4Call &)> change;
  std::vector<std::string> named;
};

// Every function that a fault concerns answers INVALID_ARGUMENT, names it, and writes nothing.
void check_faults(const std::vector<Int4Fault> &faults);

}  // namespace nf4::test
