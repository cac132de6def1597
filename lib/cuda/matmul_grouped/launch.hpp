// What launches of grouped products have in common.
#pragma once

#include <type_traits>

#include "cuda/matmul/target.hpp"
#include "cuda/matmul_grouped/args.hpp"
#include "cuda/matmul_grouped/choose.hpp"
#include "cuda/matmul_grouped/wgmma_args.hpp"

namespace nf4::cuda {

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

inline int64_t stored_cols(const Weight &weight) { return weight.cols; }
inline int64_t stored_cols(const TransposedWeight &weight) { return weight.rows; }
inline int64_t stored_cols(const Int4Weight &weight) { return weight.cols; }

template <class W>
typename ArgsOf<W>::Matmul matmul_args(const GroupedProblemOf<W> &problem, const W &weight) {
  typename ArgsOf<W>::Matmul args{};
  args.weight = view_of(weight);
  args.x = problem.x;
  args.bias = problem.bias;
  args.y = problem.y;
  args.m = problem.x_rows;
  args.x_stride = problem.x_stride;
  args.y_stride = problem.y_stride;
  args.x_vectors = has_x_vectors(two_rows(problem, weight));
  args.whole_words = is_multiple(weight.packed, 16) && stored_cols(weight) % 32 == 0;
  return args;
}

template <class W>
Groups groups_of(const GroupedProblemOf<W> &problem) {
  return {problem.ends,
          problem.x_index,
          problem.row_scale,
          problem.bias_stride,
          problem.expert_rows(),
          problem.experts,
          static_cast<int32_t>(problem.m)};
}

// Kinds of weight that skinny kernels multiply.
template <class W>
constexpr bool kHasGroupedSkinny = !std::is_same_v<W, TransposedWeight>;

cudaError_t launch_grouped_skinny(const MatmulTarget &target, const GroupedProblem &problem,
                                  int config);
cudaError_t launch_grouped_skinny(const MatmulTarget &target, const Int4GroupedProblem &problem,
                                  int config);

// Loads the skinny kernels, which may then use all the shared memory of a CTA.
cudaError_t allow_grouped_skinny(const GpuFamily &family, const Device &device);

}  // namespace nf4::cuda
