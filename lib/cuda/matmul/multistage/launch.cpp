#include "cuda/matmul/multistage/launch.hpp"

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
struct KernelsOf {
  using Type = MultistageKernels;
};
template <>
struct KernelsOf<TransposedWeight> {
  using Type = GradMultistageKernels;
};
template <>
struct KernelsOf<Int4Weight> {
  using Type = Int4MultistageKernels;
};

// The kernels by dtype and configuration.
const auto &kernels_for(const GpuFamily &family, const Weight &weight) {
  return kernels_of<MultistageKernels>(family).of[weight.has_scale_bytes()];
}
const auto &kernels_for(const GpuFamily &family, const TransposedWeight &) {
  return kernels_of<GradMultistageKernels>(family).of;
}

template <class W>
cudaError_t allow_multistage(const GpuFamily &family, const Device &device) {
  return allow_shared_memory<&KernelsOf<W>::Type::of>(family, device);
}

// Fills in what all kinds of weight have in common, and launches the kernel.
template <class W, class Args>
cudaError_t launch_kernel(const MatmulTarget &target, const MatmulProblemOf<W> &problem,
                          const void *kernel, int config, Args &args) {
  const MatmulWorkspace workspace(problem);
  const MultistagePlan plan = plan_multistage(size_of(problem), config, target.gpu.multiprocessors,
                                              target.family->tensor_cores, workspace);
  args.schedule = plan.schedule;
  args.flags = static_cast<uint64_t *>(problem.workspace);
  args.signature = next_signature();
  args.partials = reinterpret_cast<float *>(static_cast<uint8_t *>(problem.workspace) +
                                            workspace.flags_bytes());
  args.y_vectors = has_y_vectors(args.matmul.y, args.matmul.y_stride, args.matmul.m);
  return launch({kernel, plan.ctas, kMultistageThreads, target.family->pdl, target.stream,
                 multistage_smem_bytes(kind_of(problem.weight), kMatmulConfigs[config].tile_m,
                                       target.family->tensor_cores)},
                args);
}

}  // namespace

bool has_scale_pairs(const Weight &weight) {
  return weight.blocksize_log2 == 6 && weight.cols % (2 * kMultistageTileK) == 0 &&
         is_multiple(weight.absmax, weight.nested() ? 2 : 8) &&
         (!weight.nested() || weight.nested_blocksize_log2 >= 1);
}

bool has_y_vectors(const void *y, int64_t y_stride, int64_t rows) {
  return is_multiple(y, 8) && (rows == 1 || y_stride % 4 == 0);
}

template <class W>
cudaError_t load_multistage_kernels(const GpuFamily &family, const Device &device) {
  const cudaError_t error = load_kernels(kernels_of<typename KernelsOf<W>::Type>(family));
  return error == cudaSuccess ? allow_multistage<W>(family, device) : error;
}

template <class W>
cudaError_t launch_multistage(const MatmulTarget &target, const MatmulProblemOf<W> &problem,
                              const MatmulArgs &matmul, const LutCodebook &codebook, int config) {
  if (const cudaError_t error = allow_multistage<W>(*target.family, target.device)) return error;
  MultistageArgs args{};
  args.matmul = matmul;
  args.decode = codebook;
  args.scale_pairs = has_scale_pairs(problem.weight);
  const auto &kernels = kernels_for(*target.family, problem.weight);
  return launch_kernel(target, problem,
                       kernels[problem.dtype - NF4_DTYPE_FP16][config - kFirstMultistage], config,
                       args);
}

cudaError_t launch_multistage(const MatmulTarget &target, const Int4MatmulProblem &problem,
                              const Int4MatmulArgs &matmul, int config) {
  if (const cudaError_t error = allow_multistage<Int4Weight>(*target.family, target.device))
    return error;
  const Int4Weight &weight = problem.weight;
  Int4MultistageArgs args{};
  args.matmul = matmul;
  args.group_tiles = static_cast<int>(weight.group_size / kMultistageTileK);
  const auto &kernels = kernels_of<Int4MultistageKernels>(*target.family).of;
  return launch_kernel(target, problem,
                       kernels[problem.dtype - NF4_DTYPE_FP16][weight.layout - NF4_INT4_GPTQ]
                              [config - kFirstMultistage],
                       config, args);
}

template cudaError_t load_multistage_kernels<Weight>(const GpuFamily &, const Device &);
template cudaError_t load_multistage_kernels<TransposedWeight>(const GpuFamily &, const Device &);
template cudaError_t load_multistage_kernels<Int4Weight>(const GpuFamily &, const Device &);
template cudaError_t launch_multistage(const MatmulTarget &, const MatmulProblem &,
                                       const MatmulArgs &, const LutCodebook &, int);
template cudaError_t launch_multistage(const MatmulTarget &, const GradProblem &,
                                       const MatmulArgs &, const LutCodebook &, int);

}  // namespace nf4::cuda
