// Checks the arguments of matmul, for any kind of weight.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstddef>
#include <type_traits>

#include "status.hpp"
#include "validate.hpp"
#include "validate_parts.hpp"

namespace nf4 {
namespace {

const char *name_of(const nf4_tensor *const *) { return "nf4_tensor"; }
const char *name_of(const nf4_int4_tensor *const *) { return "nf4_int4_tensor"; }

// Returns the args of a product. The first product's struct_size is checked before the args of
// another are read.
const nf4_matmul_args *args_of(const nf4_matmul_args *args, int product) {
  const size_t offset = product == 0 ? 0 : product * args->struct_size;
  return reinterpret_cast<const nf4_matmul_args *>(reinterpret_cast<const char *>(args) + offset);
}

// The outputs of a product, except the workspace. They are its last operands, and y is the very
// last.
struct Outputs {
  const Operand *first, *last;
  const Operand *begin() const { return first; }
  const Operand *end() const { return last; }
};
template <class W>
Outputs outputs(const MatmulProblemOf<W> &problem) {
  const bool has_product = problem.lora.rank > 0 && problem.lora.product != nullptr;
  return {problem.operands.end() - (has_product ? 2 : 1), problem.operands.end()};
}
template <class W>
const Operand &y_of(const MatmulProblemOf<W> &problem) {
  return problem.operands.end()[-1];
}

// Tells whether the rows of one y lie between the rows of the other.
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

// Tells whether every output, from its first element to its last, is disjoint from everything else.
// This is cheaper than finding out which operands overlap, and nearly always true.
template <class W>
bool all_disjoint(const MatmulBatchOf<W> &batch) {
  Extent written[2 * NF4_MATMUL_BATCH_MAX];
  int count = 0;
  for (const auto &problem : batch)
    if (!problem.empty())
      for (const Operand &output : outputs(problem)) written[count++] = extent(output);
  std::sort(written, written + count,
            [](const Extent &a, const Extent &b) { return a.begin < b.begin; });
  for (int i = 1; i < count; ++i)
    if (written[i].begin < written[i - 1].end) return false;
  for (const auto &problem : batch) {
    if (problem.empty()) continue;
    for (const Operand &operand : problem.operands) {
      if (&operand == outputs(problem).begin()) break;
      const auto [begin, end] = extent(operand);
      const Extent *const next =
          std::upper_bound(written, written + count, begin,
                           [](uintptr_t address, const Extent &of) { return address < of.end; });
      if (next != written + count && next->begin < end) return false;
    }
  }
  return true;
}

// An output of a product must not be an operand of another product. (Each product's own check has
// already shown that nothing overlaps the workspace, which they share.)
template <class W>
nf4_status validate_disjoint(const MatmulBatchOf<W> &batch) {
  if (all_disjoint(batch)) return NF4_STATUS_OK;
  for (const auto &a : batch) {
    if (a.empty()) continue;
    for (const auto &b : batch) {
      if (b.empty() || &a == &b) continue;
      for (const Operand &output : outputs(a))
        for (const Operand &operand : b.operands) {
          if (!overlap(output, operand)) continue;
          if (&output == &y_of(a) && &operand == &y_of(b) && interleaved(a, b)) continue;
          return fail(NF4_STATUS_INVALID_ARGUMENT, "%s of product %d overlaps %s of product %d",
                      output.name, static_cast<int>(&a - batch.begin()), operand.name,
                      static_cast<int>(&b - batch.begin()));
        }
    }
  }
  return NF4_STATUS_OK;
}

// The struct_size of callers compiled before lora was appended; it stays valid.
constexpr size_t kArgsSizeWithoutLora = offsetof(nf4_matmul_args, lora);

nf4_status validate_args_size(const nf4_matmul_args &args) {
  if (args.struct_size == kArgsSizeWithoutLora) return NF4_STATUS_OK;
  return validate_struct_size("nf4_matmul_args", args.struct_size, sizeof(nf4_matmul_args));
}

const nf4_lora *lora_of(const nf4_matmul_args &args) {
  return args.struct_size == kArgsSizeWithoutLora ? nullptr : args.lora;
}

// Checks everything but pointers. The sizes of `problem` are already set.
nf4_status validate_lora_shape(const nf4_lora &, Int4MatmulProblem &) {
  return fail(NF4_STATUS_INVALID_ARGUMENT,
              "lora is not NULL; expected NULL for an nf4_int4_tensor");
}
nf4_status validate_lora_shape(const nf4_lora &lora, MatmulProblem &problem) {
  const Weight &weight = problem.weight;
  if (const nf4_status status =
          validate_struct_size("nf4_lora", lora.struct_size, sizeof(nf4_lora)))
    return status;
  if (lora.dtype != NF4_DTYPE_FP32 && lora.dtype != problem.dtype)
    return fail(NF4_STATUS_INVALID_ARGUMENT,
                "lora.dtype is %d; expected 1 (fp32) or that of the nf4_matmul_args, %d",
                lora.dtype, problem.dtype);
  if (lora.rank < 1 || lora.rank > kMaxLoraRank) return invalid("lora.rank", lora.rank, "1 to 128");
  if (!std::isfinite(lora.scale))
    return fail(NF4_STATUS_INVALID_ARGUMENT, "lora.scale is %g; expected a finite number",
                static_cast<double>(lora.scale));
  if (lora.reserved != 0) return invalid("lora.reserved", lora.reserved, "0");
  const int64_t rank = lora.rank;
  for (const Matrix &matrix : {Matrix{"lora.a_stride", lora.a_stride, rank, weight.cols, "rank"},
                               Matrix{"lora.b_stride", lora.b_stride, weight.rows, rank, "rows"}})
    if (const nf4_status status = validate_stride(matrix)) return status;
  const struct {
    const char *name;
    int64_t size;
  } sizes[] = {{"m", problem.m}, {"rows", weight.rows}, {"cols", weight.cols}};
  for (const auto &each : sizes)
    if (each.size > kMaxElements / kMaxLoraRank)
      return invalid(each.name, each.size, "at most 2^53 with a lora");
  if (weight.elements == 0) return NF4_STATUS_OK;
  problem.lora.rank = lora.rank;
  problem.lora.dtype = lora.dtype;
  problem.lora.scale = lora.scale;
  problem.lora.a_stride = lora.a_stride;
  problem.lora.b_stride = lora.b_stride;
  return NF4_STATUS_OK;
}

// Copies the pointers of a problem whose sizes are set, and of its weight. A plan and a path take
// the workspace for aligned, as a launch's is.
void copy_lora_pointers(const nf4_matmul_args &, Int4MatmulProblem &) {}
void copy_lora_pointers(const nf4_matmul_args &args, MatmulProblem &problem) {
  if (problem.lora.rank == 0) return;
  problem.lora.a = args.lora->a;
  problem.lora.b = args.lora->b;
  problem.lora.product = args.lora->product;
}
template <class Tensor, class W>
void copy_pointers(const Tensor &tensor, const nf4_matmul_args &args, void *workspace,
                   MatmulProblemOf<W> &problem) {
  copy_pointers(tensor, problem.weight);
  copy_lora_pointers(args, problem);
  problem.x = args.x;
  problem.bias = args.bias;
  problem.y = args.y;
  problem.workspace = workspace;
}

// Adds the operands that an adapter needs.
void add_lora(Int4MatmulProblem &) {}
void add_lora(MatmulProblem &problem) {
  const Lora &lora = problem.lora;
  const int item = element_bytes(lora.dtype);
  const int64_t rank = lora.rank, cols = problem.weight.cols, rows = problem.weight.rows;
  problem.operands.add("lora.a", lora.a, ((rank - 1) * lora.a_stride + cols) * item, item, false);
  problem.operands.add("lora.b", lora.b, ((rows - 1) * lora.b_stride + rank) * item, item, false);
}

}  // namespace

template <class Tensor, class W>
nf4_status validate_matmul_shape(const Tensor *tensor, const nf4_matmul_args *args,
                                 MatmulProblemOf<W> &problem) {
  if (const nf4_status status = validate_shape(tensor, problem.weight)) return status;
  if (args == nullptr) return fail(NF4_STATUS_INVALID_ARGUMENT, "the nf4_matmul_args is NULL");
  if (const nf4_status status = validate_args_size(*args)) return status;
  if (const nf4_status status = validate_dtype("dtype", args->dtype)) return status;
  if (args->reserved != 0) return invalid("nf4_matmul_args.reserved", args->reserved, "0");
  if (args->m < 0) return invalid("m", args->m, "0 or more");
  for (const Matrix &matrix :
       {Matrix{"x_stride", args->x_stride, args->m, problem.x_columns(), "m"},
        Matrix{"y_stride", args->y_stride, args->m, problem.y_columns(), "m"}})
    if (const nf4_status status = validate_stride(matrix)) return status;
  problem.dtype = args->dtype;
  problem.m = args->m;
  problem.x_stride = args->x_stride;
  problem.y_stride = args->y_stride;
  const nf4_lora *const lora = lora_of(*args);
  return lora == nullptr ? NF4_STATUS_OK : validate_lora_shape(*lora, problem);
}

template <class Tensor, class W>
nf4_status validate_matmul_operands(const Tensor *tensor, const nf4_matmul_args *args,
                                    void *workspace, int64_t workspace_bytes,
                                    MatmulProblemOf<W> &problem) {
  if (problem.gradient && args->bias != nullptr)
    return fail(NF4_STATUS_INVALID_ARGUMENT, "bias is not NULL; expected NULL in the gradient");
  if (problem.empty()) return NF4_STATUS_OK;
  if (const nf4_status status = validate_pointers(*tensor)) return status;
  copy_pointers(*tensor, *args, workspace, problem);
  const int item = element_bytes(problem.dtype);
  const auto bytes = [&](int64_t stride, int64_t columns) {
    return ((problem.m - 1) * stride + columns) * item;
  };
  if (problem.weight.elements != 0) {
    add_weight(problem.operands, problem.weight, false);
    problem.operands.add("x", problem.x, bytes(problem.x_stride, problem.x_columns()), item, false);
  }
  if (problem.bias != nullptr)
    problem.operands.add("bias", problem.bias, tensor->rows * item, item, false);
  if (problem.lora.rank > 0) add_lora(problem);
  if (workspace_bytes > 0) problem.operands.add("workspace", workspace, workspace_bytes, 16, true);
  // If there is no workspace for the adapter's product, the caller must pass memory for it.
  if (problem.lora.rank > 0 && (problem.lora.product != nullptr || workspace_bytes == 0))
    problem.operands.add("lora.product", problem.lora.product, problem.m * problem.lora.rank * item,
                         item, true);
  problem.operands.add("y", problem.y, bytes(problem.y_stride, problem.y_columns()), item, true);
  return validate_operands(problem.operands);
}

template <class W>
constexpr bool kHasFp32 = std::is_same_v<W, Weight>;

template <class W>
bool gpu_refuses(const MatmulProblemOf<W> &problem) {
  return problem.dtype == NF4_DTYPE_FP32 &&
         (!kHasFp32<W> || (!problem.gradient && problem.m > kFp32RowsOfX));
}

template <class W>
nf4_status validate_matmul_dtype(const MatmulProblemOf<W> &problem) {
  if (!gpu_refuses(problem)) return NF4_STATUS_OK;
  if (kHasFp32<W>)
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
  for (int i = 0; i < batch.count; ++i) {
    const nf4_matmul_args *const each = args_of(args, i);
    if (each->struct_size != args->struct_size)
      return of_product(fail(NF4_STATUS_INVALID_ARGUMENT,
                             "nf4_matmul_args.struct_size is %zu; expected that of product 0, %zu",
                             each->struct_size, args->struct_size),
                        i);
    if (const nf4_status status = validate_matmul_shape(tensors[i], each, batch.list[i]))
      return of_product(status, i);
  }
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
    copy_pointers(*tensors[i], *args_of(args, i), nullptr, problem);
  }
  return NF4_STATUS_OK;
}

template <class Tensor, class W>
nf4_status validate_matmul_plan(const Tensor *tensor, const nf4_matmul_args *args,
                                MatmulProblemOf<W> &problem) {
  if (const nf4_status status = validate_matmul_shape(tensor, args, problem)) return status;
  copy_pointers(*tensor, *args, nullptr, problem);
  return NF4_STATUS_OK;
}

// Instantiates the checks for each kind of weight.
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
  template nf4_status validate_matmul_plan(const Tensor *, const nf4_matmul_args *,                \
                                           MatmulProblemOf<W> &);                                  \
  template bool gpu_refuses(const MatmulProblemOf<W> &);                                           \
  template nf4_status validate_matmul_dtype(const MatmulProblemOf<W> &);
NF4_VALIDATE_MATMUL(nf4_tensor, Weight)
NF4_VALIDATE_MATMUL(nf4_int4_tensor, Int4Weight)
#undef NF4_VALIDATE_MATMUL

}  // namespace nf4
