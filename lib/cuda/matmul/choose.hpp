// Chooses the configuration that runs a product on a GPU, by what each can run and by its estimated
// cost. Calls no CUDA, so tests without a GPU cover every choice.
#pragma once

#include <cstdint>
#include <optional>

#include "cuda/costs/costs.hpp"
#include "cuda/matmul/args.hpp"
#include "cuda/matmul/configs.hpp"
#include "cuda/matmul/cost_model.hpp"
#include "cuda/matmul/workspace.hpp"
#include "cuda/weight/transposed.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// The facts of a GPU that a choice depends on.
struct GpuFacts {
  int multiprocessors;
  int shared_bytes;        // the most that a CTA may have
  bool fp16_tensor_cores;  // mma.m16n8k8 of fp16
  bool tensor_cores;       // mma.m16n8k16 of fp16 and bf16, cp.async
  bool tensor_maps;        // TMA: skinny kernels copy with it, and there are strip kernels
  bool wgmma;              // there are wgmma kernels
  // The clusters of wgmma kernels that the GPU holds at a time, by cluster size. The number differs
  // from one H200 to another, since their groups of multiprocessors differ in size.
  int resident_clusters[kMaxClusterSize + 1];
};

// How the tiles of a wgmma configuration are divided among clusters.
struct WgmmaPlan {
  int64_t n_tiles;
  int64_t m_tiles;
  int64_t stream_k_tiles;  // tiles that all CTAs share; 0 without stream-K, and with split-K
  int64_t clusters;        // groups of CTAs that share a tile, or CTAs that share all tiles
  int cluster_size;        // CTAs of a group (split-K); stream-K kernels launch no clusters for it
  double cycles;           // estimated

  int64_t tiles() const { return n_tiles * m_tiles; }
};

// Whether the tensor cores multiply x of the dtype by mma.sync; fp32 is split into fp16. Turing has
// them for fp16 alone.
constexpr bool has_mma(const GpuFacts &gpu, nf4_dtype dtype) {
  return gpu.tensor_cores || (gpu.fp16_tensor_cores && dtype == NF4_DTYPE_FP16);
}

struct MatmulChoice {
  int config;
  WgmmaPlan plan;  // set for wgmma configurations
};

// ---- What a kind of weight answers (lib/cuda/kinds) ----------------------------------------

// Returns whether a skinny kernel can run the product.
bool skinny_can_run(const GradProblem &problem, const GpuFacts &gpu, int config);
bool skinny_can_run(const MatmulProblem &problem, const GpuFacts &gpu, int config);
bool skinny_can_run(const Int4MatmulProblem &problem, const GpuFacts &gpu, int config);
// The same for the kernel of warp tiles, also where strips are faster.
bool skinny_tiles_can_run(const Int4MatmulProblem &problem, const GpuFacts &gpu, int config);
// Returns whether the sizes suit a wgmma kernel; has_kernel() says whether there is one.
bool wgmma_shape_can_run(const MatmulProblem &problem, const GpuFacts &gpu, int config);
bool wgmma_shape_can_run(const Int4MatmulProblem &problem, const GpuFacts &gpu, int config);
bool wgmma_shape_can_run(const GradProblem &problem, const GpuFacts &gpu, int config);

// Whether the weight suits the GPU's multistage kernels, beside its sizes.
bool suits_multistage(const Weight &weight, const GpuFacts &gpu);
bool suits_multistage(const TransposedWeight &weight, const GpuFacts &gpu);
bool suits_multistage(const Int4Weight &weight, const GpuFacts &gpu);

// Whether the multistage kernels are faster than the configuration that choose_skinny() returned.
constexpr bool multistage_is_faster(const MatmulProblem &, const GpuFacts &, int config) {
  return config == kMma64x64;
}
constexpr bool multistage_is_faster(const GradProblem &, const GpuFacts &, int config) {
  return config == kMma64x64;
}
bool multistage_is_faster(const Int4MatmulProblem &problem, const GpuFacts &gpu, int config);

// The estimated cycles of kSkinny16; wgmma is chosen only below skinny16_margin times them.
double skinny16_cycles(const Weight &weight, const GpuFacts &gpu, const CostModel &model);
double skinny16_cycles(const TransposedWeight &weight, const GpuFacts &gpu, const CostModel &model);
double skinny16_cycles(const Int4Weight &weight, const GpuFacts &gpu, const CostModel &model);

// Whether kSkinny2 is faster than kSkinny8 because rows are long.
bool takes_skinny2_for_long_rows(const Weight &weight, const GpuFacts &gpu);
bool takes_skinny2_for_long_rows(const TransposedWeight &weight, const GpuFacts &gpu);
bool takes_skinny2_for_long_rows(const Int4Weight &weight, const GpuFacts &gpu);

// Whether kSkinny16 is always faster than the wgmma kernels, so that these need not be loaded.
constexpr bool skinny16_always_wins(const Weight &) { return false; }
constexpr bool skinny16_always_wins(const TransposedWeight &) { return true; }
constexpr bool skinny16_always_wins(const Int4Weight &) { return false; }

// ---- The choice ----------------------------------------------------------------------------

// Returns whether there is a multistage kernel for these sizes.
bool multistage_sizes_can_run(const MatmulSize &size, const GpuFacts &gpu, int config);

// Returns whether the sizes suit the wgmma kernels of any kind.
template <class W>
bool wgmma_sizes_can_run(const MatmulProblemOf<W> &problem, const GpuFacts &gpu, int config);

template <class W>
bool wgmma_can_run(const MatmulProblemOf<W> &problem, const GpuFacts &gpu, int config) {
  return is_wgmma(config) && has_kernel(kind_of(problem.weight), config) &&
         wgmma_shape_can_run(problem, gpu, config);
}

// Whether a multistage kernel runs the product. Copies take 16 bytes of rows.
template <class W>
bool multistage_can_run(const MatmulProblemOf<W> &problem, const GpuFacts &gpu, int config) {
  return multistage_sizes_can_run(size_of(problem), gpu, config) &&
         suits_multistage(problem.weight, gpu) && is_multiple(problem.weight.packed, 16) &&
         has_x_vectors(problem);
}

// Returns the multistage configuration whose tile holds all rows of x, or the widest that can run;
// kMma64x64 if none can.
template <class W>
int choose_multistage(const MatmulProblemOf<W> &problem, const GpuFacts &gpu) {
  for (int config = multistage_config(problem.m); config >= kFirstMultistage; --config)
    if (multistage_can_run(problem, gpu, config)) return config;
  return kMma64x64;
}

template <class W>
bool can_run(const MatmulProblemOf<W> &problem, const GpuFacts &gpu, int config) {
  if (is_wgmma(config)) return wgmma_can_run(problem, gpu, config);
  if (is_multistage(config)) return multistage_can_run(problem, gpu, config);
  return is_mma(config) || skinny_can_run(problem, gpu, config);
}

// Returns whether each CTA of a stream-K configuration gets enough K-tiles, and room for its sums
// in the workspace, by stream-K or split-K.
bool can_stream_k(const MatmulSize &size, const GpuFacts &gpu, int config);

// Returns the fastest skinny configuration, or kMma64x64 if none can run the problem.
template <class W>
int choose_skinny(const MatmulProblemOf<W> &problem, const GpuFacts &gpu, const CostModel &model);

// Plans a configuration that can run the problem.
WgmmaPlan plan_wgmma(const MatmulSize &size, const GpuFacts &gpu, const CostModel &model,
                     int config);

// Chooses the wgmma configuration with the least estimated time. Leaves `choice` unchanged if none
// can run the problem, or if it is kSkinny16 and that is faster. `forced` restricts the choice to
// one.
template <class W>
void choose_wgmma(const MatmulProblemOf<W> &problem, const GpuFacts &gpu, const CostModel &model,
                  std::optional<int> forced, MatmulChoice &choice);

// Takes away multiprocessors of one group, for a kernel that runs beside wgmma kernels.
void leave_multiprocessors(int count, GpuFacts &gpu);

// Fills in the configuration of a strategy; kMma64x64 if none of another strategy can run. Returns
// the error of load(gpu), or 0.
template <class W, class Load>
auto choose_of_strategy(int strategy, const MatmulProblemOf<W> &problem, GpuFacts &gpu,
                        const CostModel &model, Load load, MatmulChoice &choice) {
  using Error = decltype(load(gpu));
  choice.config = kMma64x64;
  switch (static_cast<MatmulKernel>(strategy)) {
    case MatmulKernel::kSkinny:
      choice.config = choose_skinny(problem, gpu, model);
      break;
    case MatmulKernel::kMultistage:
      if (!gpu.wgmma) choice.config = choose_multistage(problem, gpu);
      break;
    case MatmulKernel::kWgmma:
      if (!gpu.wgmma) break;
      if (const Error error = load(gpu)) return error;
      choose_wgmma(problem, gpu, model, {}, choice);
      break;
    case MatmulKernel::kMma:
      break;
  }
  return Error{};
}

// Chooses among the strategies whose time is known, the fastest first. Fills in kMma64x64 and
// returns false if none of them can run the problem.
template <class W, class Load>
bool choose_by_times(const MatmulProblemOf<W> &problem, GpuFacts &gpu, const CostModel &model,
                     StrategyTimes times, Load load, MatmulChoice &choice,
                     decltype(load(gpu)) &error) {
  for (;;) {
    int best = -1;
    for (int i = 0; i < kDenseStrategy; ++i)
      if (times.knows(i) && (best < 0 || times.us[i] < times.us[best])) best = i;
    if (best < 0) return false;
    error = choose_of_strategy(best, problem, gpu, model, load, choice);
    if (error || strategy_of(choice.config) == best) return true;
    times.us[best] = -1;
  }
}

// Chooses the configuration: by the times that are known, or by the library's own estimates and
// rules. load(gpu) loads the wgmma kernels and fills in resident_clusters; it is called only if a
// wgmma kernel may be chosen. Returns its error, or 0.
template <class W, class Load>
auto choose_config(const MatmulProblemOf<W> &problem, GpuFacts &gpu, const CostModel &model,
                   const StrategyTimes &times, Load load, MatmulChoice &choice) {
  using Error = decltype(load(gpu));
  Error error{};
  if (choose_by_times(problem, gpu, model, times, load, choice, error)) return error;
  choice.config = choose_skinny(problem, gpu, model);
  if (!gpu.wgmma && multistage_is_faster(problem, gpu, choice.config))
    if (const int config = choose_multistage(problem, gpu); is_multistage(config))
      choice.config = config;
  if (!gpu.wgmma || choice.config == kSkinny2 || choice.config == kSkinny8 ||
      (choice.config == kSkinny16 && skinny16_always_wins(problem.weight)) ||
      problem.dtype == NF4_DTYPE_FP32)
    return error;
  error = load(gpu);
  if (!error) choose_wgmma(problem, gpu, model, {}, choice);
  return error;
}

}  // namespace nf4::cuda
