// Host side: reorder of weights, and the columns of x.
#include "cuda/permute/permute.hpp"

#include <algorithm>
#include <iterator>

#include "core/int4.hpp"
#include "cuda/backend.hpp"
#include "cuda/permute/args.hpp"
#include "cuda/permute/kernels.hpp"
#include "cuda/runtime/target.hpp"

namespace nf4::cuda {
namespace {

// Fewer rows of x are permuted by many CTAs each, which takes the shortest chain of latencies.
constexpr int64_t kFewRows = 32;

// permute_x_rows may use more shared memory than the default only after this, once a device.
cudaError_t allow_shared_memory(const LaunchTarget &target) {
  static ContextFlag known[std::size(kGpuFamilies)];
  ContextFlag &flag = known[target.family - kGpuFamilies];
  if (flag.has(target.device.index)) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernels_of<PermuteKernels>(*target.family).x_rows,
                           cudaFuncAttributeMaxDynamicSharedMemorySize, target.device.shared_bytes);
  if (error == cudaSuccess) flag.set(target.device.index);
  return error;
}

cudaError_t launch_reorder(const Int4ReorderProblem &problem, const LaunchTarget &target) {
  const PermuteKernels &kernels = kernels_of<PermuteKernels>(*target.family);
  const Int4Weight &weight = problem.from;
  const SortColumnsArgs sort{weight.g_idx, problem.permutation, weight.cols};
  const cudaError_t error =
      target.launch(kernels.sort, ceil_divide(weight.cols, kPermuteThreads), kPermuteThreads, sort);
  if (error != cudaSuccess) return error;

  PermuteCodesArgs codes{};
  codes.from = view_of(weight);
  codes.packed = problem.packed;
  codes.permutation = problem.permutation;
  codes.row_words = weight.layout == NF4_INT4_GPTQ  ? weight.rows
                    : weight.layout == NF4_INT4_AWQ ? weight.rows / kInt4PerWord
                                                    : int4_words(weight.cols);
  codes.words = codes.row_words * (weight.layout == NF4_INT4_GPTQ  ? weight.cols / kInt4PerWord
                                   : weight.layout == NF4_INT4_AWQ ? weight.cols
                                                                   : weight.rows);
  return target.launch(kernels.codes, ceil_divide(codes.words, kPermuteThreads), kPermuteThreads,
                       codes);
}

}  // namespace

nf4_status reorder(const Int4ReorderProblem &problem, nf4_stream stream) {
  return launch_on_device(
      problem.operands, stream, "launching reorder",
      [&](const LaunchTarget &target) { return launch_reorder(problem, target); });
}

cudaError_t permute_x(const Int4MatmulProblem &problem, void *to, const LaunchTarget &target) {
  const PermuteKernels &kernels = kernels_of<PermuteKernels>(*target.family);
  const int64_t cols = problem.weight.cols, staged_bytes = cols * kPermuteRows * 2;
  PermuteXArgs args{};
  args.from = static_cast<const uint16_t *>(problem.x);
  args.from_stride = problem.x_stride;
  args.to = static_cast<uint16_t *>(to);
  args.permutation = problem.weight.permutation;
  args.m = problem.m;
  args.cols = cols;
  const bool pairs = is_multiple(problem.x, 4) && problem.x_stride % 2 == 0 && cols % 8 == 0;
  if (problem.m > kFewRows && pairs && staged_bytes <= target.device.shared_bytes) {
    if (const cudaError_t error = allow_shared_memory(target)) return error;
    return launch({kernels.x_rows, ceil_divide(args.m, kPermuteRows), kPermuteRowsThreads,
                   target.family->pdl, target.stream, static_cast<int>(staged_bytes)},
                  args);
  }
  args.row_ctas = static_cast<int>(std::min<int64_t>(ceil_divide(cols, kPermuteThreads * 8), 64));
  const int64_t ctas = args.m * args.row_ctas;
  const bool pdl = target.family->pdl && ctas <= kPermutePdlCtas;
  return launch({kernels.x, ctas, kPermuteThreads, pdl, target.stream}, args);
}

}  // namespace nf4::cuda
