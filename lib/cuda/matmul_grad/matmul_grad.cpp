// Host side of the gradient, dX = dY W: it is the matmul of dY with W^T. Choose a kernel, launch.
#include "cuda/matmul_grad/matmul_grad.hpp"

#include "cuda/backend.hpp"
#include "cuda/lora/lora.hpp"
#include "cuda/matmul/beside_lora.hpp"
#include "cuda/matmul/mma/launch.hpp"
#include "cuda/matmul/target.hpp"
#include "cuda/matmul/wgmma/launch.hpp"
#include "cuda/matmul_grad/kernels.hpp"
#include "cuda/matmul_grad/skinny_launch.hpp"
#include "cuda/weight/transposed.hpp"
#include "status.hpp"

namespace nf4::cuda {
namespace {

std::optional<int> forced_config;

// Behind the rest of the workspace.
void *lora_workspace(const GradProblem &problem) {
  return static_cast<uint8_t *>(problem.workspace) + MatmulWorkspace(problem).bytes();
}

MatmulArgs grad_args(const GradProblem &problem) {
  const TransposedWeight &weight = problem.weight;
  MatmulArgs args{};
  args.weight = view_of(weight);
  args.x = problem.x;
  args.y = problem.y;
  args.m = problem.m;
  args.x_stride = problem.x_stride;
  args.y_stride = problem.y_stride;
  args.x_vectors = has_x_vectors(problem);
  args.whole_words = is_multiple(weight.packed, 16) && weight.rows % 32 == 0;
  if (problem.lora.rank > 0)
    args.lora = lora_term_of(LoraProblem(problem), lora_workspace(problem));
  return args;
}

// Skinny where it can run, then wgmma.
cudaError_t choose(const MatmulTarget &target, const GradProblem &problem, MatmulChoice &choice) {
  GpuFacts gpu = target.gpu;
  const CostModel &model = cost_model(problem.weight);
  choice.config = kMma64x64;
  for (const int config : {kSkinny8, kSkinny16})
    if (config == forced_config.value_or(config) && grad_skinny_can_run(problem, gpu, config)) {
      choice.config = config;
      return cudaSuccess;
    }
  if (!gpu.wgmma || problem.dtype == NF4_DTYPE_FP32) return cudaSuccess;
  if (forced_config && !is_wgmma(*forced_config)) return cudaSuccess;
  if (const cudaError_t error = load_wgmma_kernels(target.device, problem.weight, gpu))
    return error;
  choose_wgmma(problem, gpu, model, forced_config, choice);
  if (problem.lora.rank == 0) return cudaSuccess;
  const LoraPlan lora = plan_lora(target.device, LoraProblem(problem));
  choose_beside_lora(problem, lora.persistent_ctas, lora.cycles, gpu, model, forced_config, choice);
  return cudaSuccess;
}

cudaError_t launch_choice(const MatmulTarget &target, const GradProblem &problem,
                          const MatmulChoice &choice) {
  if (problem.lora.rank > 0)
    if (const cudaError_t error = launch_lora_product(
            target, LoraProblem(problem), lora_workspace(problem), is_wgmma(choice.config)))
      return error;
  const MatmulArgs args = grad_args(problem);
  if (is_wgmma(choice.config)) return launch_wgmma(target, problem, args, choice);
  if (is_skinny(choice.config)) return launch_grad_skinny(target, problem, args, choice.config);
  const GradKernels &kernels = kernels_of<GradKernels>(*target.family);
  // A weight without elements has no scales, of either kind.
  const bool nested = problem.weight.nested() && problem.weight.elements != 0;
  const void *kernel = kernels.mma[problem.dtype - NF4_DTYPE_FP32][nested];
  return launch_mma(target, kernel, args);
}

// Calls visit(target, problem, choice), which returns a cudaError_t, with the device current.
template <class Visit>
nf4_status with_choice(const MatmulProblem &given, nf4_stream stream, const Visit &visit) {
  const GradProblem problem = transposed(given);
  return launch_on_device(problem.operands, stream, "launching matmul_grad",
                          [&](const LaunchTarget &where) {
                            MatmulTarget target{where, facts_of(where)};
                            MatmulChoice choice{};
                            const cudaError_t error = choose(target, problem, choice);
                            return error == cudaSuccess ? visit(target, problem, choice) : error;
                          });
}

}  // namespace

nf4_status matmul_grad(const MatmulProblem &problem, nf4_stream stream) {
  return with_choice(problem, stream, launch_choice);
}

cudaError_t choose_matmul_grad(const MatmulTarget &target, const GradProblem &problem,
                               int &config) {
  MatmulChoice choice{};
  const cudaError_t error = choose(target, problem, choice);
  config = choice.config;
  return error;
}

nf4_status matmul_grad_config(const MatmulProblem &problem, nf4_stream stream, int &config) {
  return with_choice(problem, stream,
                     [&](const MatmulTarget &, const GradProblem &, const MatmulChoice &choice) {
                       config = choice.config;
                       return cudaSuccess;
                     });
}

void force_matmul_grad(std::optional<int> config) { forced_config = config; }

bool matmul_grad_has(const GpuFamily &family, int config, int compute_capability) {
  if (config == kMma64x64) return true;
  if (is_skinny(config)) return config != kSkinny2 && family.tensor_maps;
  LaunchTarget target{};
  target.family = &family;
  target.device.compute_capability = compute_capability;
  return is_wgmma(config) && has_grad_kernel(config) && facts_of(target).wgmma;
}

cudaError_t load_matmul_grad_kernels(const GpuFamily &family, const Device &device) {
  cudaError_t error = load_kernels(kernels_of<GradKernels>(family));
  if (error == cudaSuccess) error = allow_grad_skinny(family, device);
  LaunchTarget target{};
  target.family = &family;
  target.device = device;
  GpuFacts gpu = facts_of(target);
  if (error != cudaSuccess || !gpu.wgmma) return error;
  return load_wgmma_kernels(device, TransposedWeight{}, gpu);
}

}  // namespace nf4::cuda
