#include "cuda/matmul_grad/skinny_launch.hpp"

#include <utility>

#include "cuda/matmul/skinny/strip_plan.hpp"
#include "cuda/matmul_grad/kernels.hpp"
#include "cuda/matmul_grad/skinny_args.hpp"
#include "cuda/runtime/shared_memory.hpp"

namespace nf4::cuda {

cudaError_t allow_grad_skinny(const GpuFamily &family, const Device &device) {
  return allow_shared_memory<&GradKernels::skinny>(family, device);
}

cudaError_t launch_grad_skinny(const MatmulTarget &target, const GradProblem &problem,
                               MatmulArgs matmul, int config) {
  cudaError_t error = allow_grad_skinny(*target.family, target.device);
  if (error != cudaSuccess) return error;
  std::swap(matmul.weight.rows, matmul.weight.cols);  // to the stored order
  const WeightView &weight = matmul.weight;
  const int max_m = kMatmulConfigs[config].tile_m;
  const StripPlan plan = plan_strips(weight.cols, weight.rows, kGradWarpsN, target.gpu);
  GradStripArgs args{};
  args.matmul = matmul;
  args.codebook = rounded_codebook(weight, NF4_DTYPE_FP16);
  args.k_tiles = static_cast<int>(ceil_divide(weight.rows, kStripK));
  args.cluster = plan.cluster;
  args.cluster_rows = static_cast<int>(ceil_divide(plan.rows(), plan.cluster));
  error = make_tensor_map({weight.packed, weight.rows, weight.cols / 2}, weight.cols / 2,
                          plan.rows() / 2, kStripK, args.packed);
  if (error != cudaSuccess) return error;
  const int64_t x_bytes = weight.rows * 2;
  const int64_t pitch = matmul.m == 1 ? ceil_divide(x_bytes, 16) * 16 : matmul.x_stride * 2;
  error = make_tensor_map({matmul.x, matmul.m, x_bytes}, pitch, kStripK * 2, max_m, args.x);
  if (error != cudaSuccess) return error;
  const void *const kernel =
      kernels_of<GradKernels>(*target.family)
          .skinny[problem.dtype - NF4_DTYPE_FP16][problem.weight.nested()][config - kSkinny8];
  return launch({kernel, plan.strips * plan.cluster, kStripThreads, target.family->pdl,
                 target.stream, grad_strip_smem(max_m).bytes, plan.cluster},
                args);
}

}  // namespace nf4::cuda
