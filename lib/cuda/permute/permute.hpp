// Permutes columns into the order of a reordered weight.
#pragma once

#include <cuda_runtime.h>

#include "cuda/runtime/target.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// Enqueues the copy of problem.x, m x cols of 16 bits, to `to`, [m][cols] on a 16-byte boundary, in
// the order of the weight's permutation, which is not NULL. The target's device is current. The
// kernel waits for its predecessor, and its dependents may wait for it with PDL.
cudaError_t permute_x(const Int4MatmulProblem &problem, void *to, const LaunchTarget &target);

}  // namespace nf4::cuda
