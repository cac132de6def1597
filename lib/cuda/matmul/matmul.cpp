// Host side of matmul: validate locations, choose a kernel, launch.
#include "cuda/matmul/matmul.hpp"

#include <algorithm>
#include <iterator>
#include <optional>
#include <type_traits>

#include "cuda/backend.hpp"
#include "cuda/lora/kernels.hpp"
#include "cuda/lora/lora.hpp"
#include "cuda/matmul/batch.hpp"
#include "cuda/matmul/beside_lora.hpp"
#include "cuda/matmul/kernels.hpp"
#include "cuda/matmul/mma/launch.hpp"
#include "cuda/matmul/skinny/launch.hpp"
#include "cuda/matmul/wgmma/launch.hpp"
#include "cuda/matmul/workspace.hpp"
#include "cuda/permute/permute.hpp"
#include "cuda/runtime/target.hpp"
#include "status.hpp"

namespace nf4::cuda {
namespace {

std::optional<int> forced_config;

// The problem as kernels get it, with the columns of x in the order of the weight's: permute_x
// writes that x to the end of the workspace.
const MatmulProblem &in_column_order(const MatmulProblem &problem) { return problem; }
Int4MatmulProblem in_column_order(const Int4MatmulProblem &problem) {
  Int4MatmulProblem ordered = problem;
  if (problem.weight.permutation == nullptr) return ordered;
  ordered.x = static_cast<const uint8_t *>(problem.workspace) + MatmulWorkspace(problem).bytes();
  ordered.x_stride = problem.weight.cols;
  return ordered;
}

cudaError_t order_x(const MatmulTarget &, const MatmulProblem &, const MatmulProblem &) {
  return cudaSuccess;
}
cudaError_t order_x(const MatmulTarget &target, const Int4MatmulProblem &problem,
                    const Int4MatmulProblem &ordered) {
  if (problem.weight.permutation == nullptr || problem.weight.cols == 0) return cudaSuccess;
  return permute_x(problem, const_cast<void *>(ordered.x), target);
}

// Behind the rest of the workspace.
void *lora_workspace(const MatmulProblem &problem) {
  return static_cast<uint8_t *>(problem.workspace) + MatmulWorkspace(problem).bytes();
}

void set_lora(const MatmulProblem &problem, MatmulArgs &args) {
  if (problem.lora.rank > 0)
    args.lora = lora_term_of(LoraProblem(problem), lora_workspace(problem));
}
void set_lora(const Int4MatmulProblem &, Int4MatmulArgs &) {}

cudaError_t multiply_lora(const MatmulTarget &target, const MatmulProblem &problem, int config) {
  if (problem.lora.rank == 0) return cudaSuccess;
  const LoraProblem lora(problem);
  if (is_skinny(config) && has_lora_ctas(lora)) return cudaSuccess;
  return launch_lora_product(target, lora, lora_workspace(problem), is_wgmma(config));
}
cudaError_t multiply_lora(const MatmulTarget &, const Int4MatmulProblem &, int) {
  return cudaSuccess;
}

template <class W>
auto matmul_args(const MatmulProblemOf<W> &problem) {
  const W &weight = problem.weight;
  std::conditional_t<std::is_same_v<W, Weight>, MatmulArgs, Int4MatmulArgs> args{};
  args.weight = view_of(weight);
  args.x = problem.x;
  args.bias = problem.bias;
  args.y = problem.y;
  args.m = problem.m;
  args.x_stride = problem.x_stride;
  args.y_stride = problem.y_stride;
  args.x_vectors = has_x_vectors(problem);
  args.whole_words = is_multiple(weight.packed, 16) && weight.cols % 32 == 0;
  set_lora(problem, args);
  return args;
}

// They go with the best family alone: another one is forced to be tested by itself.
bool has_wgmma(const GpuFamily &family, int compute_capability) {
  return is_best_family(family, compute_capability) &&
         exact_kernels_for<WgmmaKernels>(compute_capability) != nullptr;
}

template <class W>
cudaError_t choose(const MatmulTarget &target, const MatmulProblemOf<W> &given,
                   MatmulChoice &choice) {
  const auto &problem = in_column_order(given);
  const CostModel &model = cost_model(problem.weight);
  GpuFacts gpu = target.gpu;
  const auto load = [&](GpuFacts &facts) {
    return load_wgmma_kernels(target.device, problem.weight, facts);
  };
  if (forced_config) {
    if (is_wgmma(*forced_config) && gpu.wgmma)
      if (const cudaError_t error = load(gpu)) return error;
    choice.config = can_run(problem, gpu, *forced_config) ? *forced_config : kMma64x64;
    if (is_wgmma(choice.config))
      choice.plan = plan_wgmma(size_of(problem), gpu, model, choice.config);
  } else if (const cudaError_t error = choose_config(problem, gpu, model, load, choice)) {
    return error;
  }
  if constexpr (std::is_same_v<W, Weight>) {
    if (problem.lora.rank == 0) return cudaSuccess;
    const LoraPlan lora = plan_lora(target.device, LoraProblem(problem));
    choose_beside_lora(problem, lora.persistent_ctas, lora.cycles, gpu, model, forced_config,
                       choice);
  }
  return cudaSuccess;
}

// CTAs may use more shared memory than the default only after this, once a device.
template <class Kernels>
cudaError_t allow_shared_memory(const GpuFamily &family, const Device &device) {
  static ContextFlag known[std::size(kGpuFamilies)];
  ContextFlag &flag = known[&family - kGpuFamilies];
  if (flag.has(device.index)) return cudaSuccess;
  const auto *const kernels = reinterpret_cast<const void *const *>(&kernels_of<Kernels>(family));
  for (size_t i = 0; i < sizeof(Kernels) / sizeof *kernels; ++i) {
    if (kernels[i] == nullptr || i % kFamilyConfigCount == kMma64x64) continue;
    const cudaError_t error = cudaFuncSetAttribute(
        kernels[i], cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  flag.set(device.index);
  return cudaSuccess;
}

// Where the problems are, and what runs there.
template <class W>
nf4_status find_target(const MatmulProblemOf<W> *problems, int count, nf4_stream stream,
                       MatmulTarget &target) {
  const Operands *operands[NF4_MATMUL_BATCH_MAX];
  for (int i = 0; i < count; ++i) operands[i] = &problems[i].operands;
  if (const nf4_status status = find_target(operands, count, stream, target)) return status;
  target.gpu = facts_of(target);
  return NF4_STATUS_OK;
}

template <class W>
cudaError_t choose_all(MatmulTarget &target, BatchLaunches<W> &launches) {
  return launches.choose_configs([&](const MatmulProblemOf<W> &problem, MatmulChoice &choice) {
    return choose(target, problem, choice);
  });
}

cudaError_t allow_shared_memory(const MatmulTarget &target, const MatmulProblem &) {
  return allow_shared_memory<MatmulKernels>(*target.family, target.device);
}
cudaError_t allow_shared_memory(const MatmulTarget &target, const Int4MatmulProblem &) {
  return allow_shared_memory<Int4MatmulKernels>(*target.family, target.device);
}

cudaError_t run_mma(const MatmulTarget &target, const MatmulProblem &problem,
                    const MatmulArgs &args) {
  return launch_mma(target, kernel_for(*target.family, problem, kMma64x64), args);
}
cudaError_t run_mma(const MatmulTarget &target, const Int4MatmulProblem &problem,
                    const Int4MatmulArgs &args) {
  const void *const few = mma_few_for(*target.family, problem);
  if (few != nullptr) return launch_mma_few(target, few, args);
  return launch_mma(target, kernel_for(*target.family, problem, kMma64x64), args);
}

cudaError_t run_skinny(const MatmulTarget &target, const MatmulProblem &problem,
                       const MatmulArgs &args, int config) {
  const LoraCtaArgs lora = lora_cta_args(LoraProblem(problem), lora_workspace(problem));
  return launch_skinny(target, kernel_for(*target.family, problem, config), args, lora,
                       problem.dtype, config);
}
cudaError_t run_skinny(const MatmulTarget &target, const Int4MatmulProblem &problem,
                       const Int4MatmulArgs &args, int config) {
  return launch_skinny(target, kernel_for(*target.family, problem, config), args, problem.dtype,
                       config);
}

template <class W>
cudaError_t launch_one(const MatmulTarget &target, const MatmulProblemOf<W> &given,
                       const MatmulChoice &choice) {
  const auto &problem = in_column_order(given);
  if (const cudaError_t error = order_x(target, given, problem)) return error;
  if (const cudaError_t error = multiply_lora(target, problem, choice.config)) return error;
  const auto args = matmul_args(problem);
  if (is_wgmma(choice.config)) return launch_wgmma(target, problem, args, choice);
  if (choice.config == kMma64x64) return run_mma(target, problem, args);
  if (const cudaError_t error = allow_shared_memory(target, problem)) return error;
  return run_skinny(target, problem, args, choice.config);
}

cudaError_t launch_several(const MatmulTarget &target, const SkinnyBatchProblems<Weight> &problems,
                           int config) {
  const MatmulProblem &first = *problems.list[0];
  if (const cudaError_t error = allow_shared_memory(target, first)) return error;
  MatmulArgs args[kSkinnyBatchMax];
  for (int i = 0; i < problems.count; ++i) args[i] = matmul_args(*problems.list[i]);
  return launch_skinny_batch(target, batch_kernel_for(*target.family, first, config), args,
                             problems.count, first.dtype, config);
}

template <class W>
cudaError_t launch_together(const MatmulTarget &target, const SkinnyBatchProblems<W> &problems,
                            const MatmulChoice &choice) {
  if constexpr (kHasSkinnyBatch<W>)
    if (problems.count > 1) return launch_several(target, problems, choice.config);
  return launch_one(target, *problems.list[0], choice);
}

template <class W>
nf4_status find_config(const MatmulProblemOf<W> &problem, nf4_stream stream, int &config) {
  MatmulTarget target;
  if (const nf4_status status = find_target(&problem, 1, stream, target)) return status;
  const CurrentDevice current(target.device.index);
  if (const nf4_status status = current.status()) return status;
  MatmulChoice choice{};
  const cudaError_t error = choose(target, problem, choice);
  if (error != cudaSuccess) return fail_cuda(error, "loading matmul's kernels");
  config = choice.config;
  return NF4_STATUS_OK;
}

template <class W>
nf4_status launch_all(const MatmulProblemOf<W> *problems, int count, nf4_stream stream) {
  MatmulTarget target;
  if (const nf4_status status = find_target(problems, count, stream, target)) return status;

  const CurrentDevice current(target.device.index);
  if (const nf4_status status = current.status()) return status;
  BatchLaunches<W> launches(target, problems, count);
  cudaError_t error = choose_all(target, launches);
  if (error != cudaSuccess) return fail_cuda(error, "loading matmul's kernels");
  while (launches.is_valid()) {
    const MatmulChoice &choice = launches.choice();
    error = launch_together(target, launches.next_launch(), choice);
    if (error != cudaSuccess) return fail_cuda(error, "launching matmul");
  }
  return NF4_STATUS_OK;
}

template <class W>
nf4_status plan_all(const MatmulBatchOf<W> &batch, int device, int32_t *launch_of,
                    const char **kernels) {
  MatmulTarget target{};
  if (const nf4_status status = find_matmul_device(device, target)) return status;

  const CurrentDevice current(device);
  if (const nf4_status status = current.status()) return status;
  BatchLaunches<W> launches(target, batch.list, batch.count);
  const cudaError_t error = choose_all(target, launches);
  if (error != cudaSuccess) return fail_cuda(error, "loading matmul's kernels");
  std::fill_n(launch_of, batch.count, -1);
  std::fill_n(kernels, batch.count, nullptr);
  for (int32_t launch = 0; launches.is_valid(); ++launch) {
    const int config = launches.choice().config;
    const SkinnyBatchProblems<W> together = launches.next_launch();
    for (int i = 0; i < together.count; ++i) {
      const auto product = together.list[i] - batch.list;
      launch_of[product] = launch;
      kernels[product] = kMatmulConfigs[config].name;
    }
  }
  return NF4_STATUS_OK;
}

}  // namespace

GpuFacts facts_of(const LaunchTarget &target) {
  const Device &device = target.device;
  return {device.multiprocessors,
          device.shared_bytes,
          target.family->tensor_cores,
          target.family->tensor_maps,
          has_wgmma(*target.family, device.compute_capability),
          {}};
}

nf4_status find_matmul_device(int index, MatmulTarget &target) {
  if (const nf4_status status = find_device(index, target)) return status;
  target.gpu = facts_of(target);
  return NF4_STATUS_OK;
}

cudaError_t choose_matmul(const MatmulTarget &target, const MatmulProblem &problem, int &config) {
  MatmulChoice choice{};
  const cudaError_t error = choose(target, problem, choice);
  config = choice.config;
  return error;
}
cudaError_t choose_matmul(const MatmulTarget &target, const Int4MatmulProblem &problem,
                          int &config) {
  MatmulChoice choice{};
  const cudaError_t error = choose(target, problem, choice);
  config = choice.config;
  return error;
}

nf4_status matmul_config(const MatmulProblem &problem, nf4_stream stream, int &config) {
  return find_config(problem, stream, config);
}
nf4_status matmul_config(const Int4MatmulProblem &problem, nf4_stream stream, int &config) {
  return find_config(problem, stream, config);
}

void force_matmul(std::optional<int> config) { forced_config = config; }

bool matmul_has(const GpuFamily &family, int config, int compute_capability) {
  return is_wgmma(config) ? has_codebook_kernel(config) && has_wgmma(family, compute_capability)
                          : kernels_of<MatmulKernels>(family).of[1][0][config] != nullptr;
}

cudaError_t load_matmul_kernels(const GpuFamily &family, const Device &device) {
  cudaError_t error = load_kernels(kernels_of<MatmulKernels>(family));
  if (error == cudaSuccess) error = load_kernels(kernels_of<LoraKernels>(family));
  if (error == cudaSuccess) error = load_lora_tma_kernels(device);
  if (error == cudaSuccess) error = load_kernels(kernels_of<Int4MatmulKernels>(family));
  if (error == cudaSuccess) error = load_kernels(kernels_of<Int4FewKernels>(family));
  if (error == cudaSuccess) error = allow_shared_memory<MatmulKernels>(family, device);
  if (error == cudaSuccess) error = allow_shared_memory<Int4MatmulKernels>(family, device);
  if (error != cudaSuccess || !has_wgmma(family, device.compute_capability)) return error;
  GpuFacts gpu{};
  Int4Weight weight{};
  error = load_wgmma_kernels(device, Weight{}, gpu);
  for (const nf4_int4_layout layout : {NF4_INT4_GPTQ, NF4_INT4_AWQ, NF4_INT4_COMPRESSED_TENSORS}) {
    weight.layout = layout;
    if (error == cudaSuccess) error = load_wgmma_kernels(device, weight, gpu);
  }
  return error;
}

nf4_status matmul(const MatmulProblem *problems, int count, nf4_stream stream) {
  return launch_all(problems, count, stream);
}
nf4_status matmul(const Int4MatmulProblem *problems, int count, nf4_stream stream) {
  return launch_all(problems, count, stream);
}

nf4_status matmul_plan(const MatmulBatch &batch, int device, int32_t *launches,
                       const char **kernels) {
  return plan_all(batch, device, launches, kernels);
}
nf4_status matmul_plan(const Int4MatmulBatch &batch, int device, int32_t *launches,
                       const char **kernels) {
  return plan_all(batch, device, launches, kernels);
}

}  // namespace nf4::cuda
