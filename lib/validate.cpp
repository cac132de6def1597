#include "validate.hpp"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <iterator>

#include "core/formats.hpp"
#include "status.hpp"

namespace nf4 {
namespace {

// Keeps byte counts of a tensor, and sums of a few of them, well below the limit of int64.
constexpr int64_t kMaxElements = int64_t{1} << 60;

nf4_status invalid(const char *name, int64_t value, const char *expected) {
  return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is %" PRId64 "; expected %s", name, value, expected);
}

nf4_status invalid_format(nf4_format id) {
  char known[32 * std::size(kFormats)] = "";
  int length = 0;
  for (const Format &format : kFormats)
    length += std::snprintf(known + length, sizeof known - length, "%s%d (%.8s)",
                            length == 0 ? "" : " or ", format.id, format.name);
  return invalid("format", id, known);
}

bool is_power_of_two(int64_t x) { return x > 0 && (x & (x - 1)) == 0; }

nf4_status validate_dtype(const char *name, nf4_dtype dtype) {
  if (dtype == NF4_DTYPE_FP32 || dtype == NF4_DTYPE_FP16 || dtype == NF4_DTYPE_BF16)
    return NF4_STATUS_OK;
  return invalid(name, dtype, "1 (fp32), 2 (fp16) or 3 (bf16)");
}

nf4_status validate_pointers_agree(const nf4_tensor &tensor) {
  const struct {
    const char *name;
    const void *address;
  } parts[] = {{"nested_absmax", tensor.nested_absmax},
               {"nested_code", tensor.nested_code},
               {"nested_offset", tensor.nested_offset}};
  for (const auto &part : parts) {
    if (tensor.nested_blocksize != 0 && part.address == nullptr)
      return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is NULL, but nested_blocksize is %d", part.name,
                  tensor.nested_blocksize);
    if (tensor.nested_blocksize == 0 && part.address != nullptr)
      return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is not NULL, but nested_blocksize is 0 (flat)",
                  part.name);
  }
  return NF4_STATUS_OK;
}

void add_weight(Operands &operands, const Weight &weight, bool written) {
  operands.add("packed", weight.packed, (weight.elements + 1) / 2, 1, written);
  if (weight.nested()) {
    operands.add("absmax", weight.absmax, weight.blocks, 1, written);
    operands.add("nested_absmax", weight.nested_absmax, weight.nested_blocks * 4, 4, written);
    operands.add("nested_code", weight.nested_code, kScaleCodeSize * 4, 4, false);
    operands.add("nested_offset", weight.nested_offset, 4, 4, written);
  } else {
    operands.add("absmax", weight.absmax, weight.blocks * 4, 4, written);
  }
  if (weight.codebook != nullptr)
    operands.add("codebook", weight.codebook, kCodebookSize * 4, 4, false);
}

struct Extent {
  uintptr_t begin, end;
};

Extent extent(const Operand &operand) {
  const auto begin = reinterpret_cast<uintptr_t>(operand.address);
  return {begin, begin + static_cast<uintptr_t>(operand.bytes)};
}

bool overlap(const Operand &a, const Operand &b) {
  const Extent of_a = extent(a), of_b = extent(b);
  return of_a.begin < of_b.end && of_b.begin < of_a.end;
}

nf4_status validate_operands(const Operands &operands) {
  for (const Operand &operand : operands) {
    if (operand.address == nullptr)
      return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is NULL", operand.name);
    if (reinterpret_cast<uintptr_t>(operand.address) % operand.alignment != 0)
      return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is %p; expected a multiple of %d", operand.name,
                  operand.address, operand.alignment);
  }
  for (const Operand &a : operands)
    for (const Operand *b = &a + 1; b != operands.end(); ++b)
      if ((a.written || b->written) && overlap(a, *b))
        return fail(NF4_STATUS_INVALID_ARGUMENT, "%s overlaps %s", a.name, b->name);
  return NF4_STATUS_OK;
}

// Copies the pointers to a weight that has its shape. Without elements they stay NULL: a caller may
// have left anything there, and nothing is to be read.
nf4_status validate_pointers(const nf4_tensor &tensor, Weight &weight) {
  if (weight.elements == 0) return NF4_STATUS_OK;
  weight.packed = static_cast<uint8_t *>(tensor.packed);
  weight.absmax = tensor.absmax;
  weight.nested_absmax = tensor.nested_absmax;
  weight.nested_code = tensor.nested_code;
  weight.nested_offset = tensor.nested_offset;
  weight.codebook = tensor.codebook;
  return validate_pointers_agree(tensor);
}

nf4_status validate_weight(const nf4_tensor *tensor, Weight &weight) {
  if (const nf4_status status = validate_shape(tensor, weight)) return status;
  return validate_pointers(*tensor, weight);
}

// The args of a product. The first product's struct_size is checked before another's args are read.
const nf4_matmul_args *args_of(const nf4_matmul_args *args, int product) {
  const size_t offset = product == 0 ? 0 : product * args->struct_size;
  return reinterpret_cast<const nf4_matmul_args *>(reinterpret_cast<const char *>(args) + offset);
}

// The y of a product, which is its last operand.
const Operand &output(const MatmulProblem &problem) {
  return problem.operands.list[problem.operands.count - 1];
}

// Do the rows of one y lie between those of the other?
bool interleaved(const MatmulProblem &a, const MatmulProblem &b) {
  const int64_t a_item = element_bytes(a.dtype), b_item = element_bytes(b.dtype);
  const int64_t stride = a.y_stride * a_item;
  if (stride != b.y_stride * b_item) return false;
  const auto distance =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(b.y) - reinterpret_cast<uintptr_t>(a.y));
  const int64_t from_row = (distance % stride + stride) % stride;
  return from_row >= a.weight.rows * a_item && from_row + b.weight.rows * b_item <= stride;
}

// Is every y, from its first element to its last, disjoint from everything else? Cheaper than
// finding out what overlaps what, and nearly always true.
bool all_disjoint(const MatmulBatch &batch) {
  Extent outputs[NF4_MATMUL_BATCH_MAX];
  int count = 0;
  for (const MatmulProblem &problem : batch)
    if (!problem.empty()) outputs[count++] = extent(output(problem));
  std::sort(outputs, outputs + count,
            [](const Extent &a, const Extent &b) { return a.begin < b.begin; });
  for (int i = 1; i < count; ++i)
    if (outputs[i].begin < outputs[i - 1].end) return false;
  for (const MatmulProblem &problem : batch) {
    if (problem.empty()) continue;
    for (const Operand &operand : problem.operands) {
      if (&operand == &output(problem)) continue;
      const auto [begin, end] = extent(operand);
      const Extent *const next =
          std::upper_bound(outputs, outputs + count, begin,
                           [](uintptr_t address, const Extent &of) { return address < of.end; });
      if (next != outputs + count && next->begin < end) return false;
    }
  }
  return true;
}

// No product's y may be what another reads or writes. (That no y overlaps the workspace, which they
// share, has been checked with each product.)
nf4_status validate_disjoint(const MatmulBatch &batch) {
  if (all_disjoint(batch)) return NF4_STATUS_OK;
  for (const MatmulProblem &a : batch) {
    if (a.empty()) continue;
    for (const MatmulProblem &b : batch) {
      if (b.empty() || &a == &b) continue;
      for (const Operand &operand : b.operands) {
        if (!overlap(output(a), operand)) continue;
        if (&operand == &output(b) && interleaved(a, b)) continue;
        return fail(NF4_STATUS_INVALID_ARGUMENT, "y of product %d overlaps %s of product %d",
                    static_cast<int>(&a - batch.begin()), operand.name,
                    static_cast<int>(&b - batch.begin()));
      }
    }
  }
  return NF4_STATUS_OK;
}

}  // namespace

nf4_status validate_shape(const nf4_tensor *tensor, Weight &weight) {
  if (tensor == nullptr) return fail(NF4_STATUS_INVALID_ARGUMENT, "the nf4_tensor is NULL");
  if (tensor->struct_size != sizeof(nf4_tensor))
    return fail(NF4_STATUS_INVALID_ARGUMENT,
                "nf4_tensor.struct_size is %zu; this library knows %zu", tensor->struct_size,
                sizeof(nf4_tensor));
  if (format_row(tensor->format) < 0) return invalid_format(tensor->format);
  if (!is_power_of_two(tensor->blocksize) || tensor->blocksize < kMinBlocksize ||
      tensor->blocksize > kMaxBlocksize)
    return invalid("blocksize", tensor->blocksize, "a power of two from 32 to 4096");
  if (tensor->nested_blocksize != 0 && !is_power_of_two(tensor->nested_blocksize))
    return invalid("nested_blocksize", tensor->nested_blocksize,
                   "0 (flat) or a power of two up to 2^30");
  if (tensor->reserved != 0) return invalid("reserved", tensor->reserved, "0");
  if (tensor->rows < 0) return invalid("rows", tensor->rows, "0 or more");
  if (tensor->cols < 0) return invalid("cols", tensor->cols, "0 or more");
  if (tensor->cols != 0 && tensor->rows > kMaxElements / tensor->cols)
    return fail(NF4_STATUS_INVALID_ARGUMENT,
                "rows * cols is %" PRId64 " * %" PRId64 "; expected at most 2^60", tensor->rows,
                tensor->cols);
  weight = {};
  weight.format = tensor->format;
  weight.rows = tensor->rows;
  weight.cols = tensor->cols;
  weight.elements = tensor->rows * tensor->cols;
  weight.blocksize_log2 = __builtin_ctz(static_cast<unsigned>(tensor->blocksize));
  weight.blocks = (weight.elements + weight.blocksize() - 1) >> weight.blocksize_log2;
  weight.nested_blocksize_log2 = -1;
  if (tensor->nested_blocksize != 0) {
    weight.nested_blocksize_log2 = __builtin_ctz(static_cast<unsigned>(tensor->nested_blocksize));
    weight.nested_blocks =
        (weight.blocks + weight.nested_blocksize() - 1) >> weight.nested_blocksize_log2;
  }
  return NF4_STATUS_OK;
}

nf4_status validate_dequant(const nf4_tensor *tensor, void *out, nf4_dtype dtype,
                            DequantProblem &problem) {
  if (const nf4_status status = validate_weight(tensor, problem.weight)) return status;
  if (const nf4_status status = validate_dtype("out_dtype", dtype)) return status;
  problem.out = out;
  problem.dtype = dtype;
  if (problem.weight.elements == 0) return NF4_STATUS_OK;
  add_weight(problem.operands, problem.weight, false);
  problem.operands.add("out", out, problem.weight.elements * element_bytes(dtype),
                       element_bytes(dtype), true);
  return validate_operands(problem.operands);
}

nf4_status validate_quantize(const void *in, nf4_dtype dtype, const nf4_tensor *tensor,
                             void *workspace, size_t workspace_bytes, QuantizeProblem &problem) {
  if (const nf4_status status = validate_weight(tensor, problem.weight)) return status;
  if (const nf4_status status = validate_dtype("in_dtype", dtype)) return status;
  problem.in = in;
  problem.dtype = dtype;
  problem.workspace = workspace;
  if (problem.weight.elements == 0) return NF4_STATUS_OK;
  const int64_t needed = QuantizeWorkspace(problem.weight).bytes();
  if (const nf4_status status = validate_workspace(workspace_bytes, needed)) return status;
  problem.operands.add("in", in, problem.weight.elements * element_bytes(dtype),
                       element_bytes(dtype), false);
  if (needed > 0) problem.operands.add("workspace", workspace, needed, 16, true);
  add_weight(problem.operands, problem.weight, true);
  return validate_operands(problem.operands);
}

nf4_status validate_matmul_shape(const nf4_tensor *tensor, const nf4_matmul_args *args,
                                 MatmulProblem &problem) {
  if (const nf4_status status = validate_shape(tensor, problem.weight)) return status;
  if (args == nullptr) return fail(NF4_STATUS_INVALID_ARGUMENT, "the nf4_matmul_args is NULL");
  if (args->struct_size != sizeof(nf4_matmul_args))
    return fail(NF4_STATUS_INVALID_ARGUMENT,
                "nf4_matmul_args.struct_size is %zu; this library knows %zu", args->struct_size,
                sizeof(nf4_matmul_args));
  if (const nf4_status status = validate_dtype("dtype", args->dtype)) return status;
  if (args->reserved != 0) return invalid("nf4_matmul_args.reserved", args->reserved, "0");
  if (args->m < 0) return invalid("m", args->m, "0 or more");
  const struct {
    const char *name;
    int64_t stride, columns;
  } matrices[] = {{"x_stride", args->x_stride, tensor->cols},
                  {"y_stride", args->y_stride, tensor->rows}};
  for (const auto &matrix : matrices) {
    if (matrix.stride < matrix.columns)
      return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is %" PRId64 "; expected at least %" PRId64,
                  matrix.name, matrix.stride, matrix.columns);
    if (args->m != 0 && matrix.stride > kMaxElements / args->m)
      return fail(NF4_STATUS_INVALID_ARGUMENT,
                  "m * %s is %" PRId64 " * %" PRId64 "; expected at most 2^60", matrix.name,
                  args->m, matrix.stride);
  }
  problem.dtype = args->dtype;
  problem.m = args->m;
  problem.x_stride = args->x_stride;
  problem.y_stride = args->y_stride;
  return NF4_STATUS_OK;
}

nf4_status validate_matmul_operands(const nf4_tensor *tensor, const nf4_matmul_args *args,
                                    void *workspace, int64_t workspace_bytes,
                                    MatmulProblem &problem) {
  if (problem.empty()) return NF4_STATUS_OK;
  if (const nf4_status status = validate_pointers(*tensor, problem.weight)) return status;
  problem.x = args->x;
  problem.bias = args->bias;
  problem.y = args->y;
  problem.workspace = workspace;
  const int item = element_bytes(problem.dtype);
  const auto bytes = [&](int64_t stride, int64_t columns) {
    return ((problem.m - 1) * stride + columns) * item;
  };
  if (problem.weight.elements != 0) {
    add_weight(problem.operands, problem.weight, false);
    problem.operands.add("x", problem.x, bytes(problem.x_stride, tensor->cols), item, false);
  }
  if (problem.bias != nullptr)
    problem.operands.add("bias", problem.bias, tensor->rows * item, item, false);
  if (workspace_bytes > 0) problem.operands.add("workspace", workspace, workspace_bytes, 16, true);
  problem.operands.add("y", problem.y, bytes(problem.y_stride, tensor->rows), item, true);
  return validate_operands(problem.operands);
}

nf4_status validate_matmul_dtype(const MatmulProblem &problem) {
  if (problem.dtype != NF4_DTYPE_FP32) return NF4_STATUS_OK;
  return fail(NF4_STATUS_INVALID_ARGUMENT,
              "dtype is 1 (fp32); expected 2 (fp16) or 3 (bf16) on a GPU");
}

nf4_status validate_matmul_batch_shapes(const nf4_tensor *const *tensors,
                                        const nf4_matmul_args *args, size_t count,
                                        MatmulBatch &batch) {
  if (count > NF4_MATMUL_BATCH_MAX)
    return fail(NF4_STATUS_INVALID_ARGUMENT, "count is %zu; expected at most %d", count,
                NF4_MATMUL_BATCH_MAX);
  batch.count = static_cast<int>(count);
  if (count == 0) return NF4_STATUS_OK;
  if (tensors == nullptr)
    return fail(NF4_STATUS_INVALID_ARGUMENT, "the array of nf4_tensor is NULL");
  if (args == nullptr)
    return fail(NF4_STATUS_INVALID_ARGUMENT, "the array of nf4_matmul_args is NULL");
  for (int i = 0; i < batch.count; ++i)
    if (const nf4_status status =
            validate_matmul_shape(tensors[i], args_of(args, i), batch.list[i]))
      return of_product(status, i);
  return NF4_STATUS_OK;
}

nf4_status validate_matmul_batch_operands(const nf4_tensor *const *tensors,
                                          const nf4_matmul_args *args, void *workspace,
                                          int64_t workspace_bytes, MatmulBatch &batch) {
  for (int i = 0; i < batch.count; ++i)
    if (const nf4_status status = validate_matmul_operands(tensors[i], args_of(args, i), workspace,
                                                           workspace_bytes, batch.list[i]))
      return of_product(status, i);
  return validate_disjoint(batch);
}

nf4_status validate_matmul_batch_plan(const nf4_tensor *const *tensors, const nf4_matmul_args *args,
                                      size_t count, MatmulBatch &batch) {
  if (const nf4_status status = validate_matmul_batch_shapes(tensors, args, count, batch))
    return status;
  for (int i = 0; i < batch.count; ++i) {
    MatmulProblem &problem = batch.list[i];
    if (const nf4_status status = validate_matmul_dtype(problem)) return of_product(status, i);
    problem.weight.packed = static_cast<uint8_t *>(tensors[i]->packed);
    problem.weight.codebook = tensors[i]->codebook;
    problem.x = args_of(args, i)->x;
  }
  return NF4_STATUS_OK;
}

nf4_status validate_workspace(size_t given, int64_t needed) {
  if (given >= static_cast<size_t>(needed)) return NF4_STATUS_OK;
  return fail(NF4_STATUS_INVALID_ARGUMENT, "workspace_bytes is %zu; expected at least %" PRId64,
              given, needed);
}

nf4_status validate_threads(int32_t threads) {
  return threads >= 0 ? NF4_STATUS_OK : invalid("threads", threads, "0 or more");
}

}  // namespace nf4
