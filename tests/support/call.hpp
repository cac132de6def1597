// A correct call of each function that works on a weight, to be made wrong: of a codebook weight,
// and of an integer weight.
#pragma once

#include <cstdint>
#include <vector>

#include "nf4/nf4.h"
#include "support/faults.hpp"
#include "support/guarded.hpp"

namespace nf4::test {

// The arguments that both kinds of weight have.
template <int64_t kRowsOf, int64_t kColsOf>
struct CallOf {
  static constexpr int64_t kRows = kRowsOf, kCols = kColsOf, kM = 2;
  static constexpr size_t kDenseBytes = kRows * kCols * 4, kPackedBytes = (kRows * kCols + 1) / 2;

  GuardedBuffer packed{kPackedBytes, Edge::kStart, 0};
  GuardedBuffer dense_buffer{kDenseBytes + 16, Edge::kStart, 0};
  GuardedBuffer x_buffer{kM * kCols * 4, Edge::kStart, 0};
  GuardedBuffer bias_buffer{kRows * 4, Edge::kStart, 0};
  GuardedBuffer y_buffer{kM * kRows * 4 + 16, Edge::kStart, 0};
  void *dense = dense_buffer.data();  // out of dequantize, in of quantize
  nf4_dtype dtype = NF4_DTYPE_FP32;
  int32_t threads = 1;
  nf4_matmul_args args{sizeof args,        NF4_DTYPE_BF16,  0,     kM,     x_buffer.data(), kCols,
                       bias_buffer.data(), y_buffer.data(), kRows, nullptr};
  const nf4_matmul_args *matmul = &args;

  CallOf() = default;
  CallOf(const CallOf &) = delete;
  CallOf &operator=(const CallOf &) = delete;

 protected:
  bool untouched() const {
    return packed.untouched() && dense_buffer.untouched() && x_buffer.untouched() &&
           bias_buffer.untouched() && y_buffer.untouched();
  }
};

// 291 elements, 5 blocks of 64, the last partial.
struct Call : CallOf<3, 97> {
  static constexpr int kForms[] = {kFlat, kNested};
  static constexpr const char *kTensor = "nf4_tensor";
  static const std::vector<Function<Call>> &functions();

  GuardedBuffer absmax{5 * 4, Edge::kStart, 0};
  GuardedBuffer nested_absmax{3 * 4, Edge::kStart, 0};
  GuardedBuffer nested_code{256 * 4, Edge::kStart, 0};
  GuardedBuffer nested_offset{4, Edge::kStart, 0};
  GuardedBuffer codebook{16 * 4, Edge::kStart, 0};
  GuardedBuffer workspace_buffer{64, Edge::kStart, 0};
  nf4_tensor tensor{};
  const nf4_tensor *weight = &tensor;
  void *workspace = workspace_buffer.data();
  size_t workspace_bytes = 64;

  explicit Call(int who);
  bool untouched() const;
};

struct Int4Call : CallOf<16, 64> {
  static constexpr int kForms[] = {kGptq, kAwq, kCompressed};
  static constexpr const char *kTensor = "nf4_int4_tensor";
  static constexpr int64_t kGroups = 2;
  static constexpr size_t kScaleBytes = kRows * kGroups * 2;
  static const std::vector<Function<Int4Call>> &functions();

  GuardedBuffer scales{kScaleBytes, Edge::kStart, 0};
  GuardedBuffer zeros{kRows * kGroups / 2, Edge::kStart, 0};
  GuardedBuffer g_idx{kCols * 4, Edge::kStart, 0};  // zeros
  GuardedBuffer permutation{kCols * 4, Edge::kStart, 0};
  GuardedBuffer reordered{kPackedBytes, Edge::kStart, 0};
  GuardedBuffer workspace{1 << 16, Edge::kStart, 0};
  nf4_int4_tensor tensor{};  // `from` of reorder, where it has g_idx
  nf4_int4_tensor to{};
  const nf4_int4_tensor *weight = &tensor;
  const nf4_int4_tensor *target = &to;
  bool with_g_idx = true;
  int32_t symmetric = 0;

  explicit Int4Call(int who);
  bool untouched() const;
  // The parts that reorder reads.
  nf4_int4_tensor from() const;
};

}  // namespace nf4::test
