// Checks the arguments of products of experts.
#include <cinttypes>
#include <cstdint>
#include <initializer_list>

#include "status.hpp"
#include "validate.hpp"
#include "validate_parts.hpp"

namespace nf4 {
namespace {

// A weight of codes holds all experts: each has the same number of rows and begins with a block.
nf4_status validate_experts(const Weight &weight, int32_t experts) {
  if (experts < 0) return invalid("experts", experts, "0 or more");
  if (experts == 0) {
    if (weight.rows == 0) return NF4_STATUS_OK;
    return fail(NF4_STATUS_INVALID_ARGUMENT,
                "experts is 0, but the weight has %" PRId64 " rows; expected none", weight.rows);
  }
  if (weight.rows % experts != 0)
    return fail(NF4_STATUS_INVALID_ARGUMENT,
                "experts is %d; expected a divisor of the weight's %" PRId64 " rows", experts,
                weight.rows);
  const int64_t of_expert = weight.elements / experts;
  if (experts > 1 && of_expert % weight.blocksize() != 0)
    return fail(NF4_STATUS_INVALID_ARGUMENT,
                "an expert has %" PRId64 " elements; expected a multiple of the blocksize, %" PRId64
                ", so that each begins with a block",
                of_expert, weight.blocksize());
  return NF4_STATUS_OK;
}

// A weight of integers is the weight of one expert.
nf4_status validate_experts(const Int4Weight &weight, int32_t experts) {
  if (experts < 0) return invalid("experts", experts, "0 or more");
  if (experts != 0 && weight.elements > kMaxElements / experts)
    return fail(NF4_STATUS_INVALID_ARGUMENT,
                "experts * rows * cols is %d * %" PRId64 " * %" PRId64 "; expected at most 2^60",
                experts, weight.rows, weight.cols);
  return NF4_STATUS_OK;
}

void add_experts(Operands &operands, const Weight &weight, int32_t) {
  add_weight(operands, weight, false);
}
void add_experts(Operands &operands, const Int4Weight &weight, int32_t experts) {
  const int first = operands.count;
  add_weight(operands, weight, false);
  for (int i = first; i < operands.count; ++i) operands.list[i].bytes *= experts;
}

template <class Tensor, class W>
void copy_pointers(const Tensor &tensor, const nf4_grouped_args &args,
                   GroupedProblemOf<W> &problem) {
  copy_pointers(tensor, problem.weight);
  problem.x = args.x;
  problem.y = args.y;
  problem.ends = args.ends;
  problem.bias = args.bias;
  problem.row_scale = args.row_scale;
}

nf4_status refuse_fp32(nf4_dtype dtype) {
  if (dtype != NF4_DTYPE_FP32) return NF4_STATUS_OK;
  return fail(NF4_STATUS_INVALID_ARGUMENT,
              "dtype is 1 (fp32); expected 2 (fp16) or 3 (bf16) on a GPU");
}

}  // namespace

template <class Tensor, class W>
nf4_status validate_grouped_shape(const Tensor *tensor, const nf4_grouped_args *args,
                                  GroupedProblemOf<W> &problem) {
  if (const nf4_status status = validate_shape(tensor, problem.weight)) return status;
  if (args == nullptr) return fail(NF4_STATUS_INVALID_ARGUMENT, "the nf4_grouped_args is NULL");
  if (const nf4_status status =
          validate_struct_size("nf4_grouped_args", args->struct_size, sizeof(nf4_grouped_args)))
    return status;
  if (const nf4_status status = validate_dtype("dtype", args->dtype)) return status;
  if (const nf4_status status = validate_experts(problem.weight, args->experts)) return status;
  problem.dtype = args->dtype;
  problem.experts = args->experts;
  problem.m = args->m;
  problem.x_rows = args->x_rows;
  problem.x_index = args->x_index;
  problem.x_stride = args->x_stride;
  problem.y_stride = args->y_stride;
  problem.bias_stride = args->bias == nullptr ? 0 : args->bias_stride;
  if (args->m < 0 || args->m > INT32_MAX) return invalid("m", args->m, "0 to 2^31 - 1");
  if (args->x_rows < 0) return invalid("x_rows", args->x_rows, "0 or more");
  if (args->x_index == nullptr && args->x_rows < args->m)
    return fail(NF4_STATUS_INVALID_ARGUMENT,
                "x_rows is %" PRId64 "; expected at least m, %" PRId64 ", without x_index",
                args->x_rows, args->m);
  for (const Matrix &matrix :
       {Matrix{"x_stride", args->x_stride, args->x_rows, problem.x_columns(), "x_rows"},
        Matrix{"y_stride", args->y_stride, args->m, problem.y_columns(), "m"}})
    if (const nf4_status status = validate_stride(matrix)) return status;
  if (args->bias == nullptr) return NF4_STATUS_OK;
  if (problem.gradient)
    return fail(NF4_STATUS_INVALID_ARGUMENT, "bias is not NULL; expected NULL in the gradient");
  return validate_stride(
      {"bias_stride", args->bias_stride, args->experts, problem.expert_rows(), "experts"});
}

template <class Tensor, class W>
nf4_status validate_grouped_operands(const Tensor *tensor, const nf4_grouped_args *args,
                                     void *workspace, int64_t workspace_bytes,
                                     GroupedProblemOf<W> &problem) {
  if (problem.empty()) return NF4_STATUS_OK;
  if (const nf4_status status = validate_pointers(*tensor)) return status;
  copy_pointers(*tensor, *args, problem);
  problem.workspace = workspace;
  const int item = element_bytes(problem.dtype);
  Operands &operands = problem.operands;
  if (problem.weight.elements != 0) {
    add_experts(operands, problem.weight, problem.experts);
    if (problem.x_rows != 0)
      operands.add(
          "x", problem.x,
          matrix_bytes(problem.dtype, problem.x_rows, problem.x_stride, problem.x_columns()), item,
          false);
  }
  operands.add("ends", problem.ends, int64_t{problem.experts} * 4, 4, false);
  if (problem.x_index != nullptr) operands.add("x_index", problem.x_index, problem.m * 4, 4, false);
  if (problem.bias != nullptr)
    operands.add(
        "bias", problem.bias,
        matrix_bytes(problem.dtype, problem.experts, problem.bias_stride, problem.expert_rows()),
        item, false);
  if (problem.row_scale != nullptr)
    operands.add("row_scale", problem.row_scale, problem.m * 4, 4, false);
  if (workspace_bytes > 0) operands.add("workspace", workspace, workspace_bytes, 16, true);
  operands.add("y", problem.y,
               matrix_bytes(problem.dtype, problem.m, problem.y_stride, problem.y_columns()), item,
               true);
  return validate_operands(operands);
}

template <class Tensor, class W>
nf4_status validate_grouped_plan(const Tensor *tensor, const nf4_grouped_args *args,
                                 GroupedProblemOf<W> &problem) {
  if (const nf4_status status = validate_grouped_shape(tensor, args, problem)) return status;
  copy_pointers(*tensor, *args, problem);
  return NF4_STATUS_OK;
}

bool gpu_refuses(const GroupedProblem &problem) { return problem.dtype == NF4_DTYPE_FP32; }
bool gpu_refuses(const Int4GroupedProblem &problem) {
  return problem.dtype == NF4_DTYPE_FP32 || problem.weight.g_idx != nullptr ||
         problem.weight.permutation != nullptr;
}

nf4_status validate_grouped_on_gpu(const GroupedProblem &problem) {
  return refuse_fp32(problem.dtype);
}

nf4_status validate_grouped_on_gpu(const Int4GroupedProblem &problem) {
  const Int4Weight &weight = problem.weight;
  if (const nf4_status status = refuse_fp32(problem.dtype)) return status;
  if (weight.g_idx == nullptr && weight.permutation == nullptr) return NF4_STATUS_OK;
  return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is not NULL; expected NULL for experts on a GPU",
              weight.g_idx != nullptr ? "g_idx" : "permutation");
}

// Instantiates the checks for each kind of weight.
#define NF4_VALIDATE_GROUPED(Tensor, W)                                                           \
  template nf4_status validate_grouped_shape(const Tensor *, const nf4_grouped_args *,            \
                                             GroupedProblemOf<W> &);                              \
  template nf4_status validate_grouped_operands(const Tensor *, const nf4_grouped_args *, void *, \
                                                int64_t, GroupedProblemOf<W> &);                  \
  template nf4_status validate_grouped_plan(const Tensor *, const nf4_grouped_args *,             \
                                            GroupedProblemOf<W> &);
NF4_VALIDATE_GROUPED(nf4_tensor, Weight)
NF4_VALIDATE_GROUPED(nf4_int4_tensor, Int4Weight)
#undef NF4_VALIDATE_GROUPED

}  // namespace nf4
