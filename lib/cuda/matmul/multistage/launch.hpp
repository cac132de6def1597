// The launch of the multistage kernels.
#pragma once

#include "cuda/matmul/args.hpp"
#include "cuda/matmul/target.hpp"
#include "cuda/weight/lut_codebook.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// W: a kind of weight.
template <class W>
cudaError_t load_multistage_kernels(const GpuFamily &family, const Device &device);

// The scales of two K-tiles, the first of them even, lie side by side and are aligned.
bool has_scale_pairs(const Weight &weight);
// The scales of W^T lie a stored row apart.
constexpr bool has_scale_pairs(const TransposedWeight &) { return false; }

// Four neighbours in y may be stored at once.
bool has_y_vectors(const void *y, int64_t y_stride, int64_t rows);

// Enqueues the kernel of a configuration that can run the problem. The target's device is current.
template <class W>
cudaError_t launch_multistage(const MatmulTarget &target, const MatmulProblemOf<W> &problem,
                              const MatmulArgs &matmul, const LutCodebook &codebook, int config);
cudaError_t launch_multistage(const MatmulTarget &target, const Int4MatmulProblem &problem,
                              const Int4MatmulArgs &matmul, int config);

}  // namespace nf4::cuda
