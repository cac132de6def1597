// The backend of a build without CUDA: every function returns the same status.
#include "cuda/backend.hpp"
#include "status.hpp"

namespace nf4::cuda {
namespace {

nf4_status no_cuda() { return fail(NF4_STATUS_NO_CUDA, "this libnf4 was built without CUDA"); }

}  // namespace

nf4_status dequant(const DequantProblem &, nf4_stream) { return no_cuda(); }
nf4_status quantize(const QuantizeProblem &, nf4_stream) { return no_cuda(); }
nf4_status matmul(const MatmulProblem *, int, nf4_stream) { return no_cuda(); }
nf4_status matmul_grad(const MatmulProblem &, nf4_stream) { return no_cuda(); }
nf4_status lora_grad(const LoraGradProblem &, nf4_stream) { return no_cuda(); }
nf4_status matmul_grouped(const GroupedProblem &, nf4_stream) { return no_cuda(); }
nf4_status matmul_grouped_grad(const GroupedProblem &, nf4_stream) { return no_cuda(); }
nf4_status matmul_grouped(const Int4GroupedProblem &, nf4_stream) { return no_cuda(); }
nf4_status matmul_plan(const MatmulBatch &, int, int32_t *, const char **) { return no_cuda(); }
nf4_status dequant(const Int4DequantProblem &, nf4_stream) { return no_cuda(); }
nf4_status quantize(const Int4QuantizeProblem &, nf4_stream) { return no_cuda(); }
nf4_status reorder(const Int4ReorderProblem &, nf4_stream) { return no_cuda(); }
nf4_status matmul(const Int4MatmulProblem *, int, nf4_stream) { return no_cuda(); }
nf4_status matmul_plan(const Int4MatmulBatch &, int, int32_t *, const char **) { return no_cuda(); }
nf4_status matmul_path(const MatmulProblem &, int, nf4_path &) { return no_cuda(); }
nf4_status matmul_grad_path(const MatmulProblem &, int, nf4_path &) { return no_cuda(); }
nf4_status matmul_path(const Int4MatmulProblem &, int, nf4_path &) { return no_cuda(); }
nf4_status matmul_grouped_path(const GroupedProblem &, int, nf4_path &) { return no_cuda(); }
nf4_status matmul_grouped_path(const Int4GroupedProblem &, int, nf4_path &) { return no_cuda(); }
nf4_status lora_grad_path(const LoraGradProblem &, int, nf4_path &) { return no_cuda(); }
nf4_status check_gpu(int) { return no_cuda(); }
nf4_status device_info(int, nf4_device &) { return no_cuda(); }

}  // namespace nf4::cuda
