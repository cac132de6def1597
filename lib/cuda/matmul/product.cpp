// The host side of a product and of its gradient, dX = dY W, which is the product of dY with W^T:
// choose a kernel, launch it.
#include <algorithm>
#include <optional>
#include <type_traits>

#include "cuda/backend.hpp"
#include "cuda/costs/gpu.hpp"
#include "cuda/lora/kernels.hpp"
#include "cuda/lora/lora.hpp"
#include "cuda/matmul/batch.hpp"
#include "cuda/matmul/beside_lora.hpp"
#include "cuda/matmul/launch.hpp"
#include "cuda/matmul/matmul.hpp"
#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/matmul/wgmma/launch.hpp"
#include "cuda/permute/permute.hpp"
#include "cuda/runtime/target.hpp"
#include "status.hpp"

namespace nf4::cuda {
namespace {

// Forced configurations of products and of gradients.
std::optional<int> forced_configs[2];
template <class W>
std::optional<int> forced_config() {
  return forced_configs[std::is_same_v<W, TransposedWeight>];
}

// ---- x in the order of the weight's columns -------------------------------------------------

// Returns the problem as kernels get it: permute_x writes x in the order of the weight's columns to
// the end of the workspace.
template <class W>
const MatmulProblemOf<W> &in_column_order(const MatmulProblemOf<W> &problem) {
  return problem;
}
Int4MatmulProblem in_column_order(const Int4MatmulProblem &problem) {
  Int4MatmulProblem ordered = problem;
  if (problem.weight.permutation == nullptr) return ordered;
  ordered.x = static_cast<const uint8_t *>(problem.workspace) + MatmulWorkspace(problem).bytes();
  ordered.x_stride = problem.weight.cols;
  return ordered;
}

template <class W>
cudaError_t order_x(const MatmulTarget &, const MatmulProblemOf<W> &, const MatmulProblemOf<W> &) {
  return cudaSuccess;
}
cudaError_t order_x(const MatmulTarget &target, const Int4MatmulProblem &problem,
                    const Int4MatmulProblem &ordered) {
  if (problem.weight.permutation == nullptr || problem.weight.cols == 0) return cudaSuccess;
  return permute_x(problem, const_cast<void *>(ordered.x), target);
}

// ---- Choice ---------------------------------------------------------------------------------

// The wgmma kernels go with the best family alone: another one is forced to be tested by itself.
bool has_wgmma(const GpuFamily &family, int compute_capability) {
  return is_best_family(family, compute_capability) &&
         find_wgmma_kernels(compute_capability, WgmmaTable::kCodebook, false) != nullptr;
}

template <class W>
cudaError_t choose(const MatmulTarget &target, const MatmulProblemOf<W> &given,
                   const StrategyTimes &times, MatmulChoice &choice) {
  const auto &problem = in_column_order(given);
  const CostModel &model = cost_model(problem.weight);
  const std::optional<int> forced = forced_config<W>();
  GpuFacts gpu = target.gpu;
  const auto load = [&](GpuFacts &facts) {
    const cudaError_t error =
        load_wgmma_kernels(target.device, table_of(problem.weight), /*experts=*/false);
    if (error == cudaSuccess) read_resident_clusters(target.device, facts);
    return error;
  };
  if (forced) {
    if (is_wgmma(*forced) && gpu.wgmma)
      if (const cudaError_t error = load(gpu)) return error;
    choice.config = can_run(problem, gpu, *forced) ? *forced : kMma64x64;
    if (is_wgmma(choice.config))
      choice.plan = plan_wgmma(size_of(problem), gpu, model, choice.config);
  } else if (const cudaError_t error = choose_config(problem, gpu, model, times, load, choice)) {
    return error;
  }
  if constexpr (kTakesLora<W>) {
    if (problem.lora.rank == 0 || !is_wgmma(choice.config)) return cudaSuccess;
    const LoraPlan lora = plan_lora(target.device, LoraProblem(problem));
    choose_beside_lora(problem, lora.persistent_ctas, lora.cycles, gpu, model, forced, choice);
  }
  return cudaSuccess;
}

template <class W>
cudaError_t choose_config_of(const MatmulTarget &target, const MatmulProblemOf<W> &problem,
                             const StrategyTimes &times, int &config) {
  MatmulChoice choice{};
  const cudaError_t error = choose(target, problem, times, choice);
  config = choice.config;
  return error;
}

// ---- Launch ---------------------------------------------------------------------------------

template <class W>
auto args_of(const MatmulProblemOf<W> &problem) {
  auto args = matmul_args(problem, problem.weight, problem.m, has_x_vectors(problem));
  if constexpr (kTakesLora<W>)
    if (problem.lora.rank > 0)
      args.lora = lora_term_of(LoraProblem(problem), lora_workspace(problem));
  return args;
}

// Enqueues the adapter's product with x, unless the skinny kernel makes it by itself.
template <class W>
cudaError_t multiply_lora([[maybe_unused]] const MatmulTarget &target,
                          const MatmulProblemOf<W> &problem, [[maybe_unused]] int config) {
  if constexpr (kTakesLora<W>) {
    if (problem.lora.rank == 0) return cudaSuccess;
    const LoraProblem lora(problem);
    if (is_skinny(config) && has_lora_ctas(lora)) return cudaSuccess;
    return launch_lora_product(target, lora, lora_workspace(problem), is_wgmma(config));
  }
  return cudaSuccess;
}

template <class W>
cudaError_t launch_one(const MatmulTarget &target, const MatmulProblemOf<W> &given,
                       const MatmulChoice &choice) {
  const auto &problem = in_column_order(given);
  if (const cudaError_t error = order_x(target, given, problem)) return error;
  if (const cudaError_t error = multiply_lora(target, problem, choice.config)) return error;
  const auto args = args_of(problem);
  switch (kMatmulConfigs[choice.config].kernel) {
    case MatmulKernel::kWgmma:
      return launch_wgmma(target, problem, args, choice);
    case MatmulKernel::kSkinny:
      return run_skinny(target, problem, args, choice.config);
    case MatmulKernel::kMultistage:
      return run_multistage(target, problem, args, choice.config);
    case MatmulKernel::kMma:
      break;
  }
  return run_mma(target, problem, args);
}

template <class W>
cudaError_t launch_together(const MatmulTarget &target, const SkinnyBatchProblems<W> &problems,
                            const MatmulChoice &choice) {
  if constexpr (kHasSkinnyBatch<W>)
    if (problems.count > 1) {
      MatmulArgs args[kSkinnyBatchMax];
      for (int i = 0; i < problems.count; ++i) args[i] = args_of(*problems.list[i]);
      return run_skinny_batch(target, args, problems.count, *problems.list[0], choice.config);
    }
  return launch_one(target, *problems.list[0], choice);
}

// ---- Calls ----------------------------------------------------------------------------------

// Finds where the problems are, and what runs there.
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
    return choose(target, problem, times_on(target, problem), choice);
  });
}

template <class W>
nf4_status find_config(const MatmulProblemOf<W> &problem, nf4_stream stream, int &config) {
  MatmulTarget target;
  if (const nf4_status status = find_target(&problem, 1, stream, target)) return status;
  const CurrentDevice current(target.device.index);
  if (const nf4_status status = current.status()) return status;
  const cudaError_t error = choose_config_of(target, problem, times_on(target, problem), config);
  return error == cudaSuccess ? NF4_STATUS_OK : fail_cuda(error, "loading matmul's kernels");
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
    if (error != cudaSuccess) return fail_cuda(error, launching(problems->weight));
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
          target.family->fp16_tensor_cores,
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

cudaError_t choose_matmul(const MatmulTarget &target, const MatmulProblem &problem,
                          const StrategyTimes &times, int &config) {
  return choose_config_of(target, problem, times, config);
}
cudaError_t choose_matmul(const MatmulTarget &target, const GradProblem &problem,
                          const StrategyTimes &times, int &config) {
  return choose_config_of(target, problem, times, config);
}
cudaError_t choose_matmul(const MatmulTarget &target, const Int4MatmulProblem &problem,
                          const StrategyTimes &times, int &config) {
  return choose_config_of(target, problem, times, config);
}

nf4_status matmul_config(const MatmulProblem &problem, nf4_stream stream, int &config) {
  return find_config(problem, stream, config);
}
nf4_status matmul_grad_config(const MatmulProblem &problem, nf4_stream stream, int &config) {
  return find_config(transposed(problem), stream, config);
}
nf4_status matmul_config(const Int4MatmulProblem &problem, nf4_stream stream, int &config) {
  return find_config(problem, stream, config);
}

void force_matmul(std::optional<int> config) { forced_configs[false] = config; }
void force_matmul_grad(std::optional<int> config) { forced_configs[true] = config; }

bool matmul_has(const GpuFamily &family, int config, int compute_capability) {
  if (is_wgmma(config))
    return has_kernel(WeightKind::kCodebook, config) && has_wgmma(family, compute_capability);
  if (is_multistage(config))
    return family.fp16_tensor_cores &&
           has_multistage_tile(WeightKind::kCodebook, kMatmulConfigs[config].tile_m,
                               family.tensor_cores);
  return is_mma(config) || (has_kernel(WeightKind::kCodebook, config) && family.fp16_tensor_cores);
}

bool matmul_grad_has(const GpuFamily &family, int config, int compute_capability) {
  if (!has_kernel(WeightKind::kTransposed, config)) return false;
  if (is_wgmma(config)) return has_wgmma(family, compute_capability);
  if (is_multistage(config)) return family.tensor_cores;
  return is_mma(config) || family.tensor_maps;
}

cudaError_t load_matmul_kernels(const GpuFamily &family, const Device &device) {
  cudaError_t error = load_family_kernels(family, device, Weight{});
  if (error == cudaSuccess) error = load_kernels(kernels_of<LoraKernels>(family));
  if (error == cudaSuccess) error = load_lora_tma_kernels(device);
  if (error == cudaSuccess) error = load_family_kernels(family, device, Int4Weight{});
  if (error == cudaSuccess) error = load_family_kernels(family, device, TransposedWeight{});
  if (!has_wgmma(family, device.compute_capability)) return error;
  for (int table = 0; table < kWgmmaTableCount; ++table)
    if (error == cudaSuccess)
      error = load_wgmma_kernels(device, static_cast<WgmmaTable>(table), /*experts=*/false);
  return error;
}

nf4_status matmul(const MatmulProblem *problems, int count, nf4_stream stream) {
  return launch_all(problems, count, stream);
}
nf4_status matmul(const Int4MatmulProblem *problems, int count, nf4_stream stream) {
  return launch_all(problems, count, stream);
}
nf4_status matmul_grad(const MatmulProblem &problem, nf4_stream stream) {
  const GradProblem grad = transposed(problem);
  return launch_all(&grad, 1, stream);
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
