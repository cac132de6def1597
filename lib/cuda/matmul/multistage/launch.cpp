#include "cuda/matmul/multistage/launch.hpp"

#include <type_traits>

#include "cuda/matmul/launch.hpp"
#include "cuda/matmul/multistage/args.hpp"
#include "cuda/matmul/multistage/kernels.hpp"
#include "cuda/matmul/multistage/plan.hpp"
#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/matmul/workspace.hpp"
#include "cuda/runtime/families.hpp"
#include "cuda/runtime/launch.hpp"
#include "cuda/runtime/shared_memory.hpp"
#include "cuda/runtime/signature.hpp"

namespace nf4::cuda {
namespace {

template <class W>
using KernelsOf = std::conditional_t<std::is_same_v<W, TransposedWeight>, GradMultistageKernels,
                                     MultistageKernels>;

template <class W>
cudaError_t allow_multistage(const GpuFamily &family, const Device &device) {
  return allow_shared_memory<&KernelsOf<W>::of>(family, device);
}

}  // namespace

bool has_scale_pairs(const Weight &weight) {
  return weight.blocksize_log2 == 6 && weight.cols % (2 * kMultistageTileK) == 0 &&
         is_multiple(weight.absmax, weight.nested() ? 2 : 8) &&
         (!weight.nested() || weight.nested_blocksize_log2 >= 1);
}

template <class W>
cudaError_t load_multistage_kernels(const GpuFamily &family, const Device &device) {
  const cudaError_t error = load_kernels(kernels_of<KernelsOf<W>>(family));
  return error == cudaSuccess ? allow_multistage<W>(family, device) : error;
}

template <class W>
cudaError_t launch_multistage(const MatmulTarget &target, const MatmulProblemOf<W> &problem,
                              const MatmulArgs &matmul, const LutCodebook &codebook, int config) {
  if (const cudaError_t error = allow_multistage<W>(*target.family, target.device)) return error;
  const MatmulWorkspace workspace(problem);
  const MultistagePlan plan =
      plan_multistage(size_of(problem), config, target.gpu.multiprocessors, workspace);
  MultistageArgs args{};
  args.matmul = matmul;
  args.decode = codebook;
  args.schedule = plan.schedule;
  args.flags = static_cast<uint64_t *>(problem.workspace);
  args.signature = next_signature();
  args.partials = reinterpret_cast<float *>(static_cast<uint8_t *>(problem.workspace) +
                                            workspace.flags_bytes());
  args.scale_pairs = has_scale_pairs(problem.weight);
  args.y_vectors = is_multiple(matmul.y, 8) && (matmul.m == 1 || matmul.y_stride % 4 == 0);
  const auto &kernels = kernels_of<KernelsOf<W>>(*target.family).of;
  return launch({kernels[problem.dtype - NF4_DTYPE_FP16][config - kFirstMultistage], plan.ctas,
                 kMultistageThreads, target.family->pdl, target.stream,
                 multistage_smem_bytes(kind_of(problem.weight), kMatmulConfigs[config].tile_m,
                                       target.family->tensor_cores)},
                args);
}

template cudaError_t load_multistage_kernels<Weight>(const GpuFamily &, const Device &);
template cudaError_t load_multistage_kernels<TransposedWeight>(const GpuFamily &, const Device &);
template cudaError_t launch_multistage(const MatmulTarget &, const MatmulProblem &,
                                       const MatmulArgs &, const LutCodebook &, int);
template cudaError_t launch_multistage(const MatmulTarget &, const GradProblem &,
                                       const MatmulArgs &, const LutCodebook &, int);

}  // namespace nf4::cuda
