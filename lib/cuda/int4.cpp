// Integer weights on GPUs.
#include "cuda/backend.hpp"
#include "status.hpp"

namespace nf4::cuda {
namespace {

nf4_status no_kernels() {
  return fail(NF4_STATUS_UNSUPPORTED_DEVICE, "this libnf4 has no GPU kernels of integer weights");
}

}  // namespace

nf4_status dequant(const Int4DequantProblem &, nf4_stream) { return no_kernels(); }
nf4_status quantize(const Int4QuantizeProblem &, nf4_stream) { return no_kernels(); }
nf4_status reorder(const Int4ReorderProblem &, nf4_stream) { return no_kernels(); }
nf4_status matmul(const Int4MatmulProblem *, int, nf4_stream) { return no_kernels(); }
nf4_status matmul_plan(const Int4MatmulBatch &, int, int32_t *, const char **) {
  return no_kernels();
}

}  // namespace nf4::cuda
