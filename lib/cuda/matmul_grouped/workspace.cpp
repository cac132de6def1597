// The workspace of products of experts. It holds a copy of x in the order of the rows of y for
// kernels that load x by TMA, if x has another order. Kernels for few rows read x where it is.
// Compiled without CUDA too: sizes do not depend on the build.
#include "cuda/backend.hpp"
#include "cuda/matmul_grouped/choose.hpp"

namespace nf4::cuda {

template <class W>
int64_t gathered_bytes(const GroupedProblemOf<W> &problem, int64_t few, int whole) {
  constexpr int64_t kMostCols = int64_t{1} << 22;  // the wgmma kernels' limit
  const int64_t cols = problem.x_columns();
  if (problem.empty() || problem.x_index == nullptr || problem.dtype == NF4_DTYPE_FP32 ||
      cols % whole != 0 || cols > kMostCols || problem.m <= few * problem.experts)
    return 0;
  return problem.m * cols * 2;
}

template int64_t gathered_bytes(const GroupedProblem &, int64_t, int);
template int64_t gathered_bytes(const GroupedGradProblem &, int64_t, int);
template int64_t gathered_bytes(const Int4GroupedProblem &, int64_t, int);

int64_t matmul_grouped_workspace_bytes(const GroupedProblem &problem) {
  return gathered_bytes(problem);
}
int64_t matmul_grouped_grad_workspace_bytes(const GroupedProblem &problem) {
  return gathered_bytes(transposed(problem));
}
int64_t matmul_grouped_workspace_bytes(const Int4GroupedProblem &problem) {
  return gathered_bytes(problem);
}

}  // namespace nf4::cuda
