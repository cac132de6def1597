// Checks the arguments of the gradients of an adapter's matrices.
#include <cmath>
#include <initializer_list>

#include "status.hpp"
#include "validate.hpp"
#include "validate_parts.hpp"

namespace nf4 {
namespace {

// A gradient without elements is treated as one that is not wanted.
int64_t columns_of(const void *out, int64_t columns) { return out == nullptr ? 0 : columns; }

nf4_status validate_numbers(const nf4_lora_grad_args &args) {
  if (const nf4_status status = validate_dtype("dtype", args.dtype)) return status;
  if (args.grad_dtype != NF4_DTYPE_FP32 && args.grad_dtype != args.dtype)
    return fail(NF4_STATUS_INVALID_ARGUMENT, "grad_dtype is %d; expected 1 (fp32) or the dtype, %d",
                args.grad_dtype, args.dtype);
  if (args.rank < 1 || args.rank > kMaxLoraRank) return invalid("rank", args.rank, "1 to 128");
  if (!std::isfinite(args.scale))
    return fail(NF4_STATUS_INVALID_ARGUMENT, "scale is %g; expected a finite number",
                static_cast<double>(args.scale));
  if (args.m < 0) return invalid("m", args.m, "0 or more");
  if (args.rows < 0) return invalid("rows", args.rows, "0 or more");
  if (args.cols < 0) return invalid("cols", args.cols, "0 or more");
  return NF4_STATUS_OK;
}

nf4_status validate_strides(std::initializer_list<Matrix> matrices) {
  for (const Matrix &matrix : matrices)
    if (const nf4_status status = validate_stride(matrix)) return status;
  return NF4_STATUS_OK;
}

nf4_status validate_matrices(const nf4_lora_grad_args &args, const LoraGradProblem &problem) {
  const int64_t rank = args.rank, m = args.m, rows = args.rows, cols = args.cols;
  if (problem.a.columns > 0)
    if (const nf4_status status =
            validate_strides({{"x_stride", args.x_stride, m, cols, "m"},
                              {"rank", rank, m, rank, "m"},
                              {"da_stride", args.da_stride, rank, cols, "rank"}}))
      return status;
  if (problem.b.columns > 0)
    return validate_strides({{"dy_stride", args.dy_stride, m, rows, "m"},
                             {"rank", rank, m, rank, "m"},
                             {"db_stride", args.db_stride, rows, rank, "rows"}});
  return NF4_STATUS_OK;
}

struct Names {
  const char *left, *right;
};
void add_inputs(LoraGradProblem &problem, const LoraGrad &gradient, const Names &names) {
  if (gradient.columns == 0 || problem.m == 0) return;
  const int item = element_bytes(problem.dtype);
  problem.operands.add(names.left, gradient.left,
                       matrix_bytes(problem.dtype, problem.m, problem.rank, problem.rank), item,
                       false);
  problem.operands.add(
      names.right, gradient.right,
      matrix_bytes(problem.dtype, problem.m, gradient.right_stride, gradient.columns), item, false);
}

void add_operands(LoraGradProblem &problem) {
  const int item = element_bytes(problem.grad_dtype);
  const LoraGrad &a = problem.a, &b = problem.b;
  add_inputs(problem, a, {"q", "x"});
  add_inputs(problem, b, {"p", "dy"});
  if (a.columns > 0)
    problem.operands.add("da", a.out,
                         matrix_bytes(problem.grad_dtype, problem.rank, a.out_stride, a.columns),
                         item, true);
  if (b.columns > 0)
    problem.operands.add("db", b.out,
                         matrix_bytes(problem.grad_dtype, b.columns, b.out_stride, problem.rank),
                         item, true);
}

}  // namespace

nf4_status validate_lora_grad_shape(const nf4_lora_grad_args *args, LoraGradProblem &problem) {
  if (args == nullptr) return fail(NF4_STATUS_INVALID_ARGUMENT, "the nf4_lora_grad_args is NULL");
  if (const nf4_status status =
          validate_struct_size("nf4_lora_grad_args", args->struct_size, sizeof(nf4_lora_grad_args)))
    return status;
  if (const nf4_status status = validate_numbers(*args)) return status;
  problem.dtype = args->dtype;
  problem.grad_dtype = args->grad_dtype;
  problem.rank = args->rank;
  problem.scale = args->scale;
  problem.m = args->m;
  problem.a = {args->q,  args->x,        args->x_stride, columns_of(args->da, args->cols),
               args->da, args->da_stride};
  problem.b = {args->p,  args->dy,       args->dy_stride, columns_of(args->db, args->rows),
               args->db, args->db_stride};
  return validate_matrices(*args, problem);
}

nf4_status validate_lora_grad(const nf4_lora_grad_args *args, LoraGradProblem &problem) {
  if (const nf4_status status = validate_lora_grad_shape(args, problem)) return status;
  add_operands(problem);
  return validate_operands(problem.operands);
}

}  // namespace nf4
