// The workspace of products of experts: rows of x in the order of the rows of y, where they are
// not, for kernels that load x by TMA. Experts with few rows have kernels that read x where it is.
// Compiled without CUDA too: sizes do not depend on the build.
#include "cuda/backend.hpp"

namespace nf4::cuda {

int64_t matmul_grouped_workspace_bytes(const GroupedProblem &problem) {
  constexpr int kFewRows = 4;                      // of an expert, on average
  constexpr int kWholeCols = 64;                   // that the wgmma kernels need
  constexpr int64_t kMostCols = int64_t{1} << 22;  // that they take
  const int64_t cols = problem.weight.cols;
  if (problem.empty() || problem.x_index == nullptr || problem.dtype == NF4_DTYPE_FP32 ||
      cols % kWholeCols != 0 || cols > kMostCols ||
      problem.m <= int64_t{kFewRows} * problem.experts)
    return 0;
  return problem.m * cols * 2;
}

int64_t matmul_grouped_grad_workspace_bytes(const GroupedProblem &) { return 0; }

int64_t matmul_grouped_workspace_bytes(const Int4GroupedProblem &) { return 0; }

}  // namespace nf4::cuda
