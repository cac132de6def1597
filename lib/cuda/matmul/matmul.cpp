// Host side of matmul: validate locations, choose a kernel, launch.
#include <iterator>
#include <optional>
#include <string_view>

#include "cuda/backend.hpp"
#include "cuda/matmul/batch.hpp"
#include "cuda/matmul/choose.hpp"
#include "cuda/matmul/kernels.hpp"
#include "cuda/matmul/mma/launch.hpp"
#include "cuda/matmul/skinny/launch.hpp"
#include "cuda/matmul/wgmma/launch.hpp"
#include "cuda/runtime/families.hpp"
#include "cuda/runtime/launch.hpp"
#include "cuda/runtime/locate.hpp"

namespace nf4::cuda {
namespace {

std::optional<int> forced_config;

MatmulArgs matmul_args(const MatmulProblem &problem) {
  const Weight &weight = problem.weight;
  MatmulArgs args{};
  args.weight = view_of(weight);
  args.x = problem.x;
  args.bias = problem.bias;
  args.y = problem.y;
  args.m = problem.m;
  args.x_stride = problem.x_stride;
  args.y_stride = problem.y_stride;
  args.x_vectors = has_x_vectors(problem);
  args.whole_words = is_multiple(weight.packed, 16) && weight.cols % 32 == 0;
  return args;
}

// The wgmma kernels are Hopper's, and go with the family that is.
bool has_wgmma([[maybe_unused]] const GpuFamily &family, [[maybe_unused]] int compute_capability) {
#if NF4_HAVE_SM90A
  return family.name == std::string_view(Sm90::kName) && compute_capability == 90;
#else
  return false;
#endif
}

bool can_run(const MatmulProblem &problem, const GpuFamily &family, const Device &device,
             int config) {
  if (is_wgmma(config))
    return has_wgmma(family, device.compute_capability) && wgmma_can_run(problem, config, device);
  return config == kMma64x64 || skinny_can_run(family, problem, config, device);
}

cudaError_t choose_config(const MatmulProblem &problem, const GpuFamily &family,
                          const Device &device, int &config) {
  if (forced_config) {
    config = can_run(problem, family, device, *forced_config) ? *forced_config : kMma64x64;
    return cudaSuccess;
  }
  config = choose_skinny(family, problem, device);
  if (config == kSkinny2 || config == kSkinny8) return cudaSuccess;
  return has_wgmma(family, device.compute_capability) ? choose_wgmma(problem, device, config)
                                                      : cudaSuccess;
}

// CTAs may use more shared memory than the default only after this, once a device.
cudaError_t allow_shared_memory(const GpuFamily &family, const Device &device) {
  static ContextFlag known[std::size(kGpuFamilies)];
  ContextFlag &flag = known[&family - kGpuFamilies];
  if (flag.has(device.index)) return cudaSuccess;
  const MatmulKernels &kernels = kernels_of<MatmulKernels>(family);
  for (const auto *all : {&kernels.of, &kernels.batch})
    for (const auto &dtype : *all)
      for (const auto &nested : dtype)
        for (int config = kSkinny2; config < kFamilyConfigCount; ++config) {
          if (nested[config] == nullptr) continue;
          const cudaError_t error = cudaFuncSetAttribute(
              nested[config], cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_bytes);
          if (error != cudaSuccess) return error;
        }
  flag.set(device.index);
  return cudaSuccess;
}

// The device of the problems, and the family that runs there.
nf4_status find_family(const MatmulProblem *problems, int count, nf4_stream stream, Device &device,
                       const GpuFamily *&family) {
  const Operands *operands[NF4_MATMUL_BATCH_MAX];
  for (int i = 0; i < count; ++i) operands[i] = &problems[i].operands;
  if (const nf4_status status = locate(operands, count, stream, device)) return status;
  family = family_for(device.compute_capability);
  return family != nullptr ? NF4_STATUS_OK : no_family(device);
}

cudaError_t launch_one(const MatmulProblem &problem, const GpuFamily &family, int config,
                       const Device &device, cudaStream_t stream) {
  const MatmulArgs args = matmul_args(problem);
  if (is_wgmma(config)) return launch_wgmma(problem, args, config, device, stream);
  // A weight without elements has no scales, of either kind.
  const bool nested = problem.weight.nested() && problem.weight.elements != 0;
  const void *kernel =
      kernels_of<MatmulKernels>(family).of[problem.dtype - NF4_DTYPE_FP16][nested][config];
  if (config == kMma64x64) return launch_mma(family, kernel, args, stream);
  const cudaError_t error = allow_shared_memory(family, device);
  if (error != cudaSuccess) return error;
  return launch_skinny(family, kernel, args, problem.dtype, config, device, stream);
}

cudaError_t launch_several(const SkinnyBatchProblems &problems, const GpuFamily &family, int config,
                           const Device &device, cudaStream_t stream) {
  const cudaError_t error = allow_shared_memory(family, device);
  if (error != cudaSuccess) return error;
  MatmulArgs args[kSkinnyBatchMax];
  for (int i = 0; i < problems.count; ++i) args[i] = matmul_args(*problems.list[i]);
  const MatmulProblem &first = *problems.list[0];
  return launch_skinny_batch(family, batch_kernel(first, family, config), args, problems.count,
                             first.dtype, config, device, stream);
}

}  // namespace

nf4_status matmul_config(const MatmulProblem &problem, nf4_stream stream, int &config) {
  Device device;
  const GpuFamily *family = nullptr;
  if (const nf4_status status = find_family(&problem, 1, stream, device, family)) return status;
  const CurrentDevice current(device.index);
  if (current.error() != cudaSuccess) return fail_cuda(current.error(), "cudaSetDevice");
  const cudaError_t error = choose_config(problem, *family, device, config);
  return error == cudaSuccess ? NF4_STATUS_OK : fail_cuda(error, "loading matmul's kernels");
}

void force_matmul(std::optional<int> config) { forced_config = config; }

bool matmul_has(const GpuFamily &family, int config, int compute_capability) {
  return is_wgmma(config) ? has_wgmma(family, compute_capability)
                          : kernels_of<MatmulKernels>(family).of[0][0][config] != nullptr;
}

cudaError_t load_matmul_kernels(const GpuFamily &family, const Device &device) {
  cudaError_t error = load_kernels(kernels_of<MatmulKernels>(family));
  if (error == cudaSuccess) error = allow_shared_memory(family, device);
  if (error == cudaSuccess && has_wgmma(family, device.compute_capability))
    error = load_wgmma_kernels(device);
  return error;
}

nf4_status matmul(const MatmulProblem *problems, int count, nf4_stream stream) {
  Device device;
  const GpuFamily *family = nullptr;
  if (const nf4_status status = find_family(problems, count, stream, device, family)) return status;

  const CurrentDevice current(device.index);
  if (current.error() != cudaSuccess) return fail_cuda(current.error(), "cudaSetDevice");
  BatchLaunches launches(problems, count, *family, device);
  cudaError_t error = launches.choose_configs([&](const MatmulProblem &problem, int &config) {
    return choose_config(problem, *family, device, config);
  });
  if (error != cudaSuccess) return fail_cuda(error, "loading matmul's kernels");
  while (launches.is_valid()) {
    const int config = launches.config();
    const SkinnyBatchProblems together = launches.next_launch();
    error = together.count > 1 ? launch_several(together, *family, config, device, stream)
                               : launch_one(*together.list[0], *family, config, device, stream);
    if (error != cudaSuccess) return fail_cuda(error, "launching matmul");
  }
  return NF4_STATUS_OK;
}

}  // namespace nf4::cuda
