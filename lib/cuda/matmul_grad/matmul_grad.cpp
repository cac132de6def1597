// Host side of the gradient: dx = dy W.
#include "cuda/backend.hpp"
#include "cuda/runtime/target.hpp"
#include "status.hpp"

namespace nf4::cuda {

nf4_status matmul_grad(const MatmulProblem &problem, nf4_stream stream) {
  LaunchTarget target;
  const Operands *const operands = &problem.operands;
  if (const nf4_status status = find_target(&operands, 1, stream, target)) return status;
  return fail(NF4_STATUS_UNSUPPORTED_DEVICE, "no kernel computes the gradient yet");
}

}  // namespace nf4::cuda
