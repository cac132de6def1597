// Launches of the gradient: products of W^T, for a weight with a codebook.
#include "cuda/matmul/launch.hpp"
#include "cuda/matmul/mma/launch.hpp"
#include "cuda/matmul/multistage/launch.hpp"
#include "cuda/matmul/wgmma/launch.hpp"
#include "cuda/matmul/wgmma/tile.hpp"
#include "cuda/matmul_grad/kernels.hpp"
#include "cuda/matmul_grad/skinny_launch.hpp"
#include "cuda/matmul_grouped/launch.hpp"
#include "cuda/runtime/families.hpp"

namespace nf4::cuda {

bool has_scale_vectors(const TransposedWeight &weight) {
  return weight.blocksize_log2 == 6 && weight.rows % 128 == 0 &&
         is_multiple(weight.absmax, weight.nested() ? 2 : 8) && weight.nested_blocksize_log2 != 0;
}

cudaError_t make_weight_map(const TransposedWeight &weight, int tile_n, TensorMap &map) {
  return make_tensor_map({weight.packed, weight.cols, weight.rows / 2}, weight.rows / 2, tile_n / 2,
                         kTileK, map);
}

cudaError_t run_mma(const MatmulTarget &target, const GradProblem &problem,
                    const MatmulArgs &args) {
  const void *const kernel = kernels_of<GradKernels>(*target.family)
                                 .mma[problem.dtype - NF4_DTYPE_FP32][scale_kind(problem.weight)];
  return launch_mma(target, kernel, args);
}

cudaError_t run_skinny(const MatmulTarget &target, const GradProblem &problem,
                       const MatmulArgs &args, int config) {
  return launch_grad_skinny(target, problem, args, config);
}

cudaError_t run_multistage(const MatmulTarget &target, const GradProblem &problem,
                           const MatmulArgs &args, int config) {
  return launch_multistage(target, problem, args,
                           decode_args(problem.weight, problem.dtype, kMatmulConfigs[config]),
                           config);
}

cudaError_t load_family_kernels(const GpuFamily &family, const Device &device,
                                const TransposedWeight &) {
  cudaError_t error = load_kernels(kernels_of<GradKernels>(family));
  if (error == cudaSuccess) error = allow_grad_skinny(family, device);
  return error == cudaSuccess ? load_multistage_kernels<TransposedWeight>(family, device) : error;
}

const void *experts_mma_kernel(const GroupedKernels &kernels, const GroupedGradProblem &problem) {
  return kernels.grad_mma[problem.dtype - NF4_DTYPE_FP16][scale_kind(problem.weight)];
}

}  // namespace nf4::cuda
