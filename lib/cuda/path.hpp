// Which way a product is expected to take less time (nf4_path): libnf4's kernel, or dequantize and
// a dense product of the caller's. The one place that decides this for GPUs. Calls no CUDA, so that
// a test without a GPU holds every answer.
#pragma once

#include "cuda/matmul/choose.hpp"
#include "cuda/matmul_grouped/stack.hpp"
#include "nf4/nf4.h"
#include "problem.hpp"

namespace nf4::cuda {

// `config` is the kernel configuration that the launch of the problem would choose.
nf4_path path_of(const MatmulProblem &problem, int config, const GpuFacts &gpu);
nf4_path path_of(const Int4MatmulProblem &problem, int config, const GpuFacts &gpu);
nf4_path path_of(const GradProblem &problem, int config, const GpuFacts &gpu);
nf4_path path_of(const GroupedProblem &problem, int config, const GpuFacts &gpu);
nf4_path path_of(const GroupedGradProblem &problem, int config, const GpuFacts &gpu);
nf4_path path_of(const Int4GroupedProblem &problem, int config, const GpuFacts &gpu);
nf4_path path_of(const LoraGradProblem &problem, const GpuFacts &gpu);

}  // namespace nf4::cuda
