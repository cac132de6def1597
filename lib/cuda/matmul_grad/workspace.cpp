// The workspace of the gradient. Compiled without CUDA too: sizes do not depend on the build.
#include "cuda/matmul/workspace.hpp"

#include "cuda/backend.hpp"

namespace nf4::cuda {

int64_t matmul_grad_workspace_bytes(const MatmulProblem &problem) {
  if (problem.weight.elements == 0) return 0;
  return MatmulWorkspace(transposed(problem)).bytes() + lora_workspace_bytes(problem);
}

}  // namespace nf4::cuda
