#include "support/call.hpp"

#include <algorithm>
#include <cstring>

namespace nf4::test {
namespace {

// The product of a call as the second of two, of which the first is right and is not done either
// where the second is not.
template <class Multiply>
nf4_status after_another(const Call &call, const Multiply &multiply) {
  const Call right(kFlat);
  const nf4_tensor *const weights[] = {right.weight, call.weight};
  const nf4_matmul_args args[] = {right.args, call.matmul ? *call.matmul : nf4_matmul_args{}};
  const nf4_status status = multiply(weights, call.matmul ? args : nullptr);
  if (status != NF4_STATUS_OK) CHECK(right.untouched());
  return status;
}

template <class Reorder>
nf4_status reorder(const Int4Call &call, const Reorder &multiply) {
  const nf4_int4_tensor from = call.from();
  return multiply(call.weight == nullptr ? nullptr : &from, call.target);
}

}  // namespace

Call::Call(int who) {
  const bool nested = (who & kNested) != 0;
  tensor.struct_size = sizeof tensor;
  tensor.format = NF4_FORMAT_NF4;
  tensor.blocksize = 64;
  tensor.nested_blocksize = nested ? 2 : 0;
  tensor.rows = kRows;
  tensor.cols = kCols;
  tensor.packed = packed.data();
  tensor.absmax = absmax.data();
  std::memcpy(nested_code.data(), nf4_scale_code(), nested_code.size());
  if (!nested) return;
  tensor.nested_absmax = floats(nested_absmax);
  tensor.nested_code = floats(nested_code);
  tensor.nested_offset = floats(nested_offset);
}

bool Call::untouched() const {
  for (const GuardedBuffer *buffer : {&absmax, &nested_absmax, &nested_offset, &workspace_buffer})
    if (!buffer->untouched()) return false;
  return CallOf::untouched() && nested_code.surroundings_intact() &&
         std::memcmp(nested_code.data(), nf4_scale_code(), nested_code.size()) == 0;
}

const std::vector<Function<Call>> &Call::functions() {
  static const std::vector<Function<Call>> list = {
      {"nf4_dequant_cpu", kDequant | kCpu,
       [](Call &c) { return nf4_dequant_cpu(c.weight, c.dense, c.dtype, c.threads); }},
      {"nf4_dequant_launch", kDequant | kLaunch,
       [](Call &c) { return nf4_dequant_launch(c.weight, c.dense, c.dtype, nullptr); }},
      {"nf4_quantize_cpu", kQuantize | kCpu,
       [](Call &c) {
         return nf4_quantize_cpu(c.dense, c.dtype, c.weight, c.workspace, c.workspace_bytes,
                                 c.threads);
       }},
      {"nf4_quantize_launch", kQuantize | kLaunch,
       [](Call &c) {
         return nf4_quantize_launch(c.dense, c.dtype, c.weight, c.workspace, c.workspace_bytes,
                                    nullptr);
       }},
      {"nf4_matmul_cpu", kMultiply | kCpu,
       [](Call &c) { return nf4_matmul_cpu(c.weight, c.matmul, c.threads); }},
      {"nf4_matmul_launch", kMultiply | kLaunch,
       [](Call &c) {
         return nf4_matmul_launch(c.weight, c.matmul, c.workspace, c.workspace_bytes, nullptr);
       }},
      {"nf4_matmul_batch_cpu", kMultiply | kCpu,
       [](Call &c) {
         return after_another(c, [&](auto weights, auto args) {
           return nf4_matmul_batch_cpu(weights, args, 2, c.threads);
         });
       }},
      {"nf4_matmul_batch_launch", kMultiply | kLaunch,
       [](Call &c) {
         return after_another(c, [&](auto weights, auto args) {
           return nf4_matmul_batch_launch(weights, args, 2, c.workspace, c.workspace_bytes,
                                          nullptr);
         });
       }},
  };
  return list;
}

Int4Call::Int4Call(int who) {
  tensor.struct_size = sizeof tensor;
  tensor.layout = (who & kAwq) != 0          ? NF4_INT4_AWQ
                  : (who & kCompressed) != 0 ? NF4_INT4_COMPRESSED_TENSORS
                                             : NF4_INT4_GPTQ;
  tensor.scales_dtype = NF4_DTYPE_FP16;
  tensor.group_size = kCols / kGroups;
  tensor.rows = kRows;
  tensor.cols = kCols;
  tensor.packed = packed.data();
  tensor.scales = scales.data();
  tensor.zeros = zeros.data();
  to = tensor;
  to.packed = reordered.data();
  to.permutation = integers(permutation);
  std::memset(g_idx.data(), 0, g_idx.size());
}

bool Int4Call::untouched() const {
  for (const GuardedBuffer *buffer : {&scales, &zeros, &permutation, &reordered, &workspace})
    if (!buffer->untouched()) return false;
  return CallOf::untouched() && g_idx.surroundings_intact() &&
         std::count(g_idx.data(), g_idx.data() + g_idx.size(), 0) == kCols * 4;
}

nf4_int4_tensor Int4Call::from() const {
  nf4_int4_tensor result = tensor;
  if (with_g_idx) result.g_idx = integers(g_idx);
  return result;
}

const std::vector<Function<Int4Call>> &Int4Call::functions() {
  static const std::vector<Function<Int4Call>> list = {
      {"nf4_int4_dequant_cpu", kDequant | kCpu,
       [](Int4Call &c) { return nf4_int4_dequant_cpu(c.weight, c.dense, c.dtype, c.threads); }},
      {"nf4_int4_dequant_launch", kDequant | kLaunch,
       [](Int4Call &c) { return nf4_int4_dequant_launch(c.weight, c.dense, c.dtype, nullptr); }},
      {"nf4_int4_quantize_cpu", kQuantize | kCpu,
       [](Int4Call &c) {
         return nf4_int4_quantize_cpu(c.dense, c.dtype, c.weight, c.symmetric, c.threads);
       }},
      {"nf4_int4_quantize_launch", kQuantize | kLaunch,
       [](Int4Call &c) {
         return nf4_int4_quantize_launch(c.dense, c.dtype, c.weight, c.symmetric, nullptr);
       }},
      {"nf4_int4_reorder_cpu", kReorder | kCpu,
       [](Int4Call &c) {
         return reorder(
             c, [&](auto from, auto to) { return nf4_int4_reorder_cpu(from, to, c.threads); });
       }},
      {"nf4_int4_reorder_launch", kReorder | kLaunch,
       [](Int4Call &c) {
         return reorder(
             c, [](auto from, auto to) { return nf4_int4_reorder_launch(from, to, nullptr); });
       }},
      {"nf4_int4_matmul_cpu", kMultiply | kCpu,
       [](Int4Call &c) { return nf4_int4_matmul_cpu(c.weight, c.matmul, c.threads); }},
      {"nf4_int4_matmul_launch", kMultiply | kLaunch,
       [](Int4Call &c) {
         return nf4_int4_matmul_launch(c.weight, c.matmul, c.workspace.data(), c.workspace.size(),
                                       nullptr);
       }},
      {"nf4_int4_matmul_batch_cpu", kMultiply | kCpu,
       [](Int4Call &c) { return nf4_int4_matmul_batch_cpu(&c.weight, c.matmul, 1, c.threads); }},
      {"nf4_int4_matmul_batch_launch", kMultiply | kLaunch,
       [](Int4Call &c) {
         return nf4_int4_matmul_batch_launch(&c.weight, c.matmul, 1, c.workspace.data(),
                                             c.workspace.size(), nullptr);
       }},
  };
  return list;
}

}  // namespace nf4::test
