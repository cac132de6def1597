// Chooses the configuration that runs a grouped product on a GPU. Calls no CUDA.
#pragma once

#include "cuda/matmul/choose.hpp"
#include "cuda/matmul_grouped/stack.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// Returns the most chunks of up to `rows` rows that the experts' rows of x make.
template <class W>
int64_t max_chunks(const GroupedProblemOf<W> &problem, int rows) {
  return std::min(problem.m, problem.experts + problem.m / rows);
}

// Returns the tiles of an expert along N.
template <class W>
int64_t expert_n_tiles(const GroupedProblemOf<W> &problem, int config) {
  return ceil_divide(problem.expert_rows(), kMatmulConfigs[config].tile_n);
}

// Returns the product of two rows of x with a weight; one row may have any stride.
template <class W>
MatmulProblemOf<W> two_rows(const GroupedProblemOf<W> &problem, const W &weight) {
  MatmulProblemOf<W> two{};
  two.weight = weight;
  two.dtype = problem.dtype;
  two.m = 2;
  two.x = problem.x;
  two.x_stride = problem.x_stride;
  two.y = problem.y;
  two.y_stride = problem.y_stride;
  return two;
}

constexpr int64_t kMaxMapRows = int64_t{1} << 30;  // the rows of a tensor map

// The cost of a CTA tile: cycles of its multiprocessor for `columns` columns, cycles for each row
// of x that these are multiplied with, and cycles beside them. Fitted by hand to times of forced
// kernels on an H200 (docs/design/matmul-grouped.md); other GPUs use the same figures.
struct ExpertsCost {
  int config;
  int columns;
  double cycles;
  double row_cycles;
  double tile_cycles;
};
// The rows of a kind of weight.
struct ExpertsCosts {
  template <int Count>
  explicit ExpertsCosts(const ExpertsCost (&rows)[Count]) : first(rows), last(rows + Count) {}
  const ExpertsCost *begin() const { return first; }
  const ExpertsCost *end() const { return last; }

  const ExpertsCost *first;
  const ExpertsCost *last;
};

// ---- What a kind of weight answers (lib/cuda/kinds) ----------------------------------------

// The bytes of x that are gathered into the workspace first, for kernels that cannot gather by
// themselves.
int64_t gathered_bytes(const GroupedProblem &problem);
int64_t gathered_bytes(const GroupedGradProblem &problem);
int64_t gathered_bytes(const Int4GroupedProblem &problem);
bool skinny_can_run_experts(const GroupedProblem &problem, const GpuFacts &gpu, int config);
bool skinny_can_run_experts(const GroupedGradProblem &problem, const GpuFacts &gpu, int config);
bool skinny_can_run_experts(const Int4GroupedProblem &problem, const GpuFacts &gpu, int config);

// Whether each expert of a stack along N begins with a whole word of zero points.
bool begins_words(const Weight &weight, int64_t expert_rows);
bool begins_words(const TransposedWeight &weight, int64_t expert_rows);
bool begins_words(const Int4Weight &weight, int64_t expert_rows);

ExpertsCosts experts_costs(const Weight &weight);
ExpertsCosts experts_costs(const TransposedWeight &weight);
ExpertsCosts experts_costs(const Int4Weight &weight);

// ---- The choice ----------------------------------------------------------------------------

// Returns the bytes of gathered x, where kernels that need no copy are faster with up to `few` mean
// rows of an expert, and the wgmma kernels take x only if its columns are a multiple of `whole`.
template <class W>
int64_t gathered_bytes(const GroupedProblemOf<W> &problem, int64_t few, int whole);

// Returns whether a configuration can run the problem, for each kind of weight.
template <class W>
bool grouped_can_run(const GroupedProblemOf<W> &problem, const GpuFacts &gpu, int config);

// Returns the configuration with the least estimated time of those that can run the problem.
template <class W>
int choose_grouped(const GroupedProblemOf<W> &problem, const GpuFacts &gpu);

}  // namespace nf4::cuda
