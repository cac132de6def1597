// Which configuration of kMatmulConfigs runs a grouped product on a GPU. Calls no CUDA.
#pragma once

#include "cuda/matmul/choose.hpp"
#include "cuda/matmul_grouped/stack.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// The most chunks of up to `rows` rows that the experts' rows of x make.
template <class W>
int64_t max_chunks(const GroupedProblemOf<W> &problem, int rows) {
  return std::min(problem.m, problem.experts + problem.m / rows);
}

// Tiles along N of an expert.
template <class W>
int64_t expert_n_tiles(const GroupedProblemOf<W> &problem, int config) {
  return ceil_divide(problem.expert_rows(), kMatmulConfigs[config].tile_n);
}

// Two rows of x, so that a stride counts, times a weight.
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

// What is gathered first into the workspace, of kernels that cannot gather by themselves.
int64_t gathered_bytes(const GroupedProblem &problem);
int64_t gathered_bytes(const GroupedGradProblem &problem);
int64_t gathered_bytes(const Int4GroupedProblem &problem);

// Of the kinds of weight that backend.hpp has.
template <class W>
bool grouped_can_run(const GroupedProblemOf<W> &problem, const GpuFacts &gpu, int config);

// The configuration of the least estimated time, of those that can run the problem.
template <class W>
int choose_grouped(const GroupedProblemOf<W> &problem, const GpuFacts &gpu);

}  // namespace nf4::cuda
