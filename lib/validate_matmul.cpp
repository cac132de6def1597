// The checks of matmul, for any kind of weight.
#include <algorithm>
#include <cinttypes>
#include <type_traits>

#include "status.hpp"
#include "validate.hpp"
#include "validate_parts.hpp"

namespace nf4 {
namespace {

const char *name_of(const nf4_tensor *const *) { return "nf4_tensor"; }
const char *name_of(const nf4_int4_tensor *const *) { return "nf4_int4_tensor"; }

// The args of a product. The first product's struct_size is checked before another's args are read.
const nf4_matmul_args *args_of(const nf4_matmul_args *args, int product) {
  const size_t offset = product == 0 ? 0 : product * args->struct_size;
  return reinterpret_cast<const nf4_matmul_args *>(reinterpret_cast<const char *>(args) + offset);
}

// The y of a product, which is its last operand.
template <class W>
const Operand &output(const MatmulProblemOf<W> &problem) {
  return problem.operands.list[problem.operands.count - 1];
}

// Do the rows of one y lie between those of the other?
template <class W>
bool interleaved(const MatmulProblemOf<W> &a, const MatmulProblemOf<W> &b) {
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
template <class W>
bool all_disjoint(const MatmulBatchOf<W> &batch) {
  Extent outputs[NF4_MATMUL_BATCH_MAX];
  int count = 0;
  for (const auto &problem : batch)
    if (!problem.empty()) outputs[count++] = extent(output(problem));
  std::sort(outputs, outputs + count,
            [](const Extent &a, const Extent &b) { return a.begin < b.begin; });
  for (int i = 1; i < count; ++i)
    if (outputs[i].begin < outputs[i - 1].end) return false;
  for (const auto &problem : batch) {
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
template <class W>
nf4_status validate_disjoint(const MatmulBatchOf<W> &batch) {
  if (all_disjoint(batch)) return NF4_STATUS_OK;
  for (const auto &a : batch) {
    if (a.empty()) continue;
    for (const auto &b : batch) {
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

template <class Tensor, class W>
nf4_status validate_matmul_shape(const Tensor *tensor, const nf4_matmul_args *args,
                                 MatmulProblemOf<W> &problem) {
  if (const nf4_status status = validate_shape(tensor, problem.weight)) return status;
  if (args == nullptr) return fail(NF4_STATUS_INVALID_ARGUMENT, "the nf4_matmul_args is NULL");
  if (const nf4_status status =
          validate_struct_size("nf4_matmul_args", args->struct_size, sizeof(nf4_matmul_args)))
    return status;
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

template <class Tensor, class W>
nf4_status validate_matmul_operands(const Tensor *tensor, const nf4_matmul_args *args,
                                    void *workspace, int64_t workspace_bytes,
                                    MatmulProblemOf<W> &problem) {
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

template <class W>
nf4_status validate_matmul_dtype(const MatmulProblemOf<W> &problem) {
  constexpr bool kHasFp32 = std::is_same_v<W, Weight>;
  if (problem.dtype != NF4_DTYPE_FP32 || (kHasFp32 && problem.m <= kFp32RowsOfX))
    return NF4_STATUS_OK;
  if (kHasFp32)
    return fail(NF4_STATUS_INVALID_ARGUMENT,
                "dtype is 1 (fp32) and m is %" PRId64
                "; expected m of at most %d, or dtype 2 "
                "(fp16) or 3 (bf16), on a GPU",
                problem.m, kFp32RowsOfX);
  return fail(NF4_STATUS_INVALID_ARGUMENT,
              "dtype is 1 (fp32); expected 2 (fp16) or 3 (bf16) on a GPU");
}

template <class Tensor, class W>
nf4_status validate_matmul_batch_shapes(const Tensor *const *tensors, const nf4_matmul_args *args,
                                        size_t count, MatmulBatchOf<W> &batch) {
  if (count > NF4_MATMUL_BATCH_MAX)
    return fail(NF4_STATUS_INVALID_ARGUMENT, "count is %zu; expected at most %d", count,
                NF4_MATMUL_BATCH_MAX);
  batch.count = static_cast<int>(count);
  if (count == 0) return NF4_STATUS_OK;
  if (tensors == nullptr)
    return fail(NF4_STATUS_INVALID_ARGUMENT, "the array of %s is NULL", name_of(tensors));
  if (args == nullptr)
    return fail(NF4_STATUS_INVALID_ARGUMENT, "the array of nf4_matmul_args is NULL");
  for (int i = 0; i < batch.count; ++i)
    if (const nf4_status status =
            validate_matmul_shape(tensors[i], args_of(args, i), batch.list[i]))
      return of_product(status, i);
  return NF4_STATUS_OK;
}

template <class Tensor, class W>
nf4_status validate_matmul_batch_operands(const Tensor *const *tensors, const nf4_matmul_args *args,
                                          void *workspace, int64_t workspace_bytes,
                                          MatmulBatchOf<W> &batch) {
  for (int i = 0; i < batch.count; ++i)
    if (const nf4_status status = validate_matmul_operands(tensors[i], args_of(args, i), workspace,
                                                           workspace_bytes, batch.list[i]))
      return of_product(status, i);
  return validate_disjoint(batch);
}

template <class Tensor, class W>
nf4_status validate_matmul_batch_plan(const Tensor *const *tensors, const nf4_matmul_args *args,
                                      size_t count, MatmulBatchOf<W> &batch) {
  if (const nf4_status status = validate_matmul_batch_shapes(tensors, args, count, batch))
    return status;
  for (int i = 0; i < batch.count; ++i) {
    MatmulProblemOf<W> &problem = batch.list[i];
    if (const nf4_status status = validate_matmul_dtype(problem)) return of_product(status, i);
    copy_plan_pointers(*tensors[i], problem.weight);
    problem.x = args_of(args, i)->x;
  }
  return NF4_STATUS_OK;
}

// The kinds of weights.
#define NF4_VALIDATE_MATMUL(Tensor, W)                                                             \
  template nf4_status validate_matmul_shape(const Tensor *, const nf4_matmul_args *,               \
                                            MatmulProblemOf<W> &);                                 \
  template nf4_status validate_matmul_operands(const Tensor *, const nf4_matmul_args *, void *,    \
                                               int64_t, MatmulProblemOf<W> &);                     \
  template nf4_status validate_matmul_batch_shapes(const Tensor *const *, const nf4_matmul_args *, \
                                                   size_t, MatmulBatchOf<W> &);                    \
  template nf4_status validate_matmul_batch_operands(                                              \
      const Tensor *const *, const nf4_matmul_args *, void *, int64_t, MatmulBatchOf<W> &);        \
  template nf4_status validate_matmul_batch_plan(const Tensor *const *, const nf4_matmul_args *,   \
                                                 size_t, MatmulBatchOf<W> &);                      \
  template nf4_status validate_matmul_dtype(const MatmulProblemOf<W> &);
NF4_VALIDATE_MATMUL(nf4_tensor, Weight)
NF4_VALIDATE_MATMUL(nf4_int4_tensor, Int4Weight)
#undef NF4_VALIDATE_MATMUL

}  // namespace nf4
