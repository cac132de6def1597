// Which matmul configuration runs a product on a GPU: what each can run, and a cost model. Calls no
// CUDA, so that a test without a GPU holds every choice.
#pragma once

#include <cstdint>
#include <optional>

#include "cuda/matmul/configs.hpp"
#include "cuda/matmul/cost_model.hpp"
#include "cuda/matmul/workspace.hpp"
#include "cuda/weight/transposed.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// What a choice depends on.
struct GpuFacts {
  int multiprocessors;
  int shared_bytes;   // that a CTA may have
  bool tensor_cores;  // there are skinny kernels
  bool tensor_maps;   // which copy with TMA
  bool wgmma;         // there are wgmma kernels
  // By cluster size: the clusters of wgmma kernels that it holds at a time. It differs from one
  // H200 to another, as their groups of multiprocessors differ in size.
  int resident_clusters[kMaxClusterSize + 1];
};

// How the tiles of a wgmma configuration are divided among clusters.
struct WgmmaPlan {
  int64_t n_tiles;
  int64_t m_tiles;
  int64_t stream_k_tiles;  // of a stream-K configuration; 0 if it shares each tile by itself
  int64_t clusters;
  int cluster_size;  // CTAs that share a tile (split-K); of a stream-K configuration no clusters
  double cycles;     // estimated

  int64_t tiles() const { return n_tiles * m_tiles; }
};

struct MatmulChoice {
  int config;
  WgmmaPlan plan;  // of a wgmma configuration
};

// ---- What a kind of weight answers (lib/cuda/kinds) ----------------------------------------

// What its kernels can run.
bool skinny_can_run(const GradProblem &problem, const GpuFacts &gpu, int config);
bool skinny_can_run(const MatmulProblem &problem, const GpuFacts &gpu, int config);
bool skinny_can_run(const Int4MatmulProblem &problem, const GpuFacts &gpu, int config);
// By warp tiles, also where strips are faster.
bool skinny_tiles_can_run(const Int4MatmulProblem &problem, const GpuFacts &gpu, int config);
// These look at sizes alone; has_kernel() says whether there is a kernel of the configuration.
bool wgmma_shape_can_run(const MatmulProblem &problem, const GpuFacts &gpu, int config);
bool wgmma_shape_can_run(const Int4MatmulProblem &problem, const GpuFacts &gpu, int config);
bool wgmma_shape_can_run(const GradProblem &problem, const GpuFacts &gpu, int config);
// Whether the sizes suit the wgmma kernels of any kind.
template <class W>
bool wgmma_sizes_can_run(const MatmulProblemOf<W> &problem, const GpuFacts &gpu, int config);

// The estimated cycles of kSkinny16; wgmma is chosen only below skinny16_margin times them.
double skinny16_cycles(const Weight &weight, const GpuFacts &gpu, const CostModel &model);
double skinny16_cycles(const TransposedWeight &weight, const GpuFacts &gpu, const CostModel &model);
double skinny16_cycles(const Int4Weight &weight, const GpuFacts &gpu, const CostModel &model);

// Whether kSkinny2 is faster than kSkinny8 because rows are long.
bool takes_skinny2_for_long_rows(const Weight &weight, const GpuFacts &gpu);
bool takes_skinny2_for_long_rows(const TransposedWeight &weight, const GpuFacts &gpu);
bool takes_skinny2_for_long_rows(const Int4Weight &weight, const GpuFacts &gpu);

// ---- The choice ----------------------------------------------------------------------------

template <class W>
bool wgmma_can_run(const MatmulProblemOf<W> &problem, const GpuFacts &gpu, int config) {
  return has_kernel(kind_of(problem.weight), config) && wgmma_shape_can_run(problem, gpu, config);
}

template <class W>
bool can_run(const MatmulProblemOf<W> &problem, const GpuFacts &gpu, int config) {
  if (is_wgmma(config)) return wgmma_can_run(problem, gpu, config);
  return is_mma(config) || skinny_can_run(problem, gpu, config);
}

// Whether each CTA of a stream-K configuration gets enough K-tiles, and room for its sums in the
// workspace, by stream-K or split-K.
bool can_stream_k(const MatmulSize &size, const GpuFacts &gpu, int config);

// The fastest skinny configuration; kMma64x64 if none can run the problem.
template <class W>
int choose_skinny(const MatmulProblemOf<W> &problem, const GpuFacts &gpu, const CostModel &model);

// For can_run().
WgmmaPlan plan_wgmma(const MatmulSize &size, const GpuFacts &gpu, const CostModel &model,
                     int config);

// The wgmma configuration of the least estimated time, of those that can run the problem. `choice`
// stays if there is none, or if it is kSkinny16 and that takes less. `forced`: of this one alone.
template <class W>
void choose_wgmma(const MatmulProblemOf<W> &problem, const GpuFacts &gpu, const CostModel &model,
                  std::optional<int> forced, MatmulChoice &choice);

// Leaves multiprocessors, of one group, to a kernel that runs beside wgmma kernels.
void leave_multiprocessors(int count, GpuFacts &gpu);

// Fills in the choice. load(gpu) fills in resident_clusters, which wgmma kernels alone need, so
// that they are loaded only then; its error, if it is not 0, is returned.
template <class W, class Load>
auto choose_config(const MatmulProblemOf<W> &problem, GpuFacts &gpu, const CostModel &model,
                   Load load, MatmulChoice &choice) {
  using Error = decltype(load(gpu));
  choice.config = choose_skinny(problem, gpu, model);
  if (!gpu.wgmma || choice.config == kSkinny2 || choice.config == kSkinny8 ||
      problem.dtype == NF4_DTYPE_FP32)
    return Error{};
  if (const Error error = load(gpu)) return error;
  choose_wgmma(problem, gpu, model, {}, choice);
  return Error{};
}

}  // namespace nf4::cuda
