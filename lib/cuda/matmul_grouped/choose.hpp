// Which configuration of kMatmulConfigs runs a grouped product on a GPU. Calls no CUDA.
#pragma once

#include "cuda/matmul/choose.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// What decides which kernels of a single weight could run its parts: two rows of x times the stack
// of experts.
MatmulProblem stack_problem(const GroupedProblem &problem);

// The most chunks of up to `rows` rows that the experts' rows of x make.
int64_t max_chunks(const GroupedProblem &problem, int rows);

// Tiles along N of an expert.
int64_t expert_n_tiles(const GroupedProblem &problem, int config);

bool grouped_can_run(const GroupedProblem &problem, const GpuFacts &gpu, int config);

// The configuration of the least estimated time, of those that can run the problem.
int choose_grouped(const GroupedProblem &problem, const GpuFacts &gpu);

}  // namespace nf4::cuda
