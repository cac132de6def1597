// The launch of a product: the arguments that all kinds of weight share, and the functions that
// each kind defines on its page in lib/cuda/kinds.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/matmul/args.hpp"
#include "cuda/matmul/skinny/launch.hpp"
#include "cuda/matmul/target.hpp"
#include "cuda/matmul/wgmma/args.hpp"
#include "cuda/matmul/workspace.hpp"
#include "cuda/weight/transposed.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// The args of kernels, by kind.
template <class W>
struct ArgsOf {
  using Matmul = MatmulArgs;
  using Wgmma = WgmmaArgs;
};
template <>
struct ArgsOf<Int4Weight> {
  using Matmul = Int4MatmulArgs;
  using Wgmma = Int4WgmmaArgs;
};

// Whether a product takes an adapter, and whether skinny kernels take several weights in one
// launch.
template <class W>
constexpr bool kTakesLora = !std::is_same_v<W, Int4Weight>;
template <class W>
constexpr bool kHasSkinnyBatch = std::is_same_v<W, Weight>;

// The columns of the weight as it is stored.
constexpr int64_t stored_cols(const Weight &weight) { return weight.cols; }
constexpr int64_t stored_cols(const TransposedWeight &weight) { return weight.rows; }
constexpr int64_t stored_cols(const Int4Weight &weight) { return weight.cols; }

// Fills in all of a kernel's args but those of an adapter. `rows_of_x`: x_rows of experts, else m.
template <class W, class Problem>
typename ArgsOf<W>::Matmul matmul_args(const Problem &problem, const W &weight, int64_t rows_of_x,
                                       bool x_vectors) {
  typename ArgsOf<W>::Matmul args{};
  args.weight = view_of(weight);
  args.x = problem.x;
  args.bias = problem.bias;
  args.y = problem.y;
  args.m = rows_of_x;
  args.x_stride = problem.x_stride;
  args.y_stride = problem.y_stride;
  args.x_vectors = x_vectors;
  args.whole_words = is_multiple(weight.packed, 16) && stored_cols(weight) % 32 == 0;
  return args;
}

// The adapter's part of the workspace, behind what stream-K kernels exchange.
template <class W>
void *lora_workspace(const MatmulProblemOf<W> &problem) {
  return static_cast<uint8_t *>(problem.workspace) + MatmulWorkspace(problem).bytes();
}

// Names the operation in error messages.
constexpr const char *launching(const Weight &) { return "launching matmul"; }
constexpr const char *launching(const TransposedWeight &) { return "launching matmul_grad"; }
constexpr const char *launching(const Int4Weight &) { return "launching int4_matmul"; }

// ---- What a kind of weight answers (lib/cuda/kinds) ----------------------------------------

// Enqueues a mma, skinny or multistage kernel. The target's device is current.
cudaError_t run_mma(const MatmulTarget &target, const MatmulProblem &problem,
                    const MatmulArgs &args);
cudaError_t run_mma(const MatmulTarget &target, const GradProblem &problem, const MatmulArgs &args);
cudaError_t run_mma(const MatmulTarget &target, const Int4MatmulProblem &problem,
                    const Int4MatmulArgs &args);
cudaError_t run_skinny(const MatmulTarget &target, const MatmulProblem &problem,
                       const MatmulArgs &args, int config);
cudaError_t run_skinny(const MatmulTarget &target, const GradProblem &problem,
                       const MatmulArgs &args, int config);
cudaError_t run_skinny(const MatmulTarget &target, const Int4MatmulProblem &problem,
                       const Int4MatmulArgs &args, int config);

cudaError_t run_multistage(const MatmulTarget &target, const MatmulProblem &problem,
                           const MatmulArgs &args, int config);
cudaError_t run_multistage(const MatmulTarget &target, const Int4MatmulProblem &problem,
                           const Int4MatmulArgs &args, int config);
cudaError_t run_multistage(const MatmulTarget &target, const GradProblem &problem,
                           const MatmulArgs &args, int config);

// The kernel of a skinny configuration for several weights in one launch; NULL if there is none.
const void *batch_kernel_for(const MatmulTarget &target, const MatmulProblem &problem, int config);
cudaError_t run_skinny_batch(const MatmulTarget &target, const MatmulArgs *args, int count,
                             const MatmulProblem &first, int config);

// Loads the family's kernels for the kind of weight on the device, which is current.
cudaError_t load_family_kernels(const GpuFamily &family, const Device &device, const Weight &);
cudaError_t load_family_kernels(const GpuFamily &family, const Device &device,
                                const TransposedWeight &);
cudaError_t load_family_kernels(const GpuFamily &family, const Device &device, const Int4Weight &);

}  // namespace nf4::cuda
