// Host side of products of experts.
#include "cuda/backend.hpp"
#include "status.hpp"

namespace nf4::cuda {

nf4_status matmul_grouped(const GroupedProblem &, nf4_stream) {
  return fail(NF4_STATUS_UNSUPPORTED_DEVICE, "this build has no kernels of grouped matmul");
}

}  // namespace nf4::cuda
