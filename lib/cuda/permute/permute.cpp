// The host side of reordering weights and permuting the columns of x.
#include "cuda/permute/permute.hpp"

#include <algorithm>

#include "core/int4.hpp"
#include "cuda/backend.hpp"
#include "cuda/permute/args.hpp"
#include "cuda/permute/kernels.hpp"
#include "cuda/runtime/shared_memory.hpp"
#include "cuda/runtime/target.hpp"

namespace nf4::cuda {
namespace {

// For permute_x_rows; the best number on an H200.
constexpr int64_t kRowsCtasPerMultiprocessor = 2;

bool has_whole_vectors(const PermuteXArgs &args) {
  return args.cols <= 1 << 16 && args.cols % kPermuteColumns == 0 &&
         (args.m == 1 || args.from_stride % kPermuteColumns == 0) && is_multiple(args.from, 16) &&
         is_multiple(args.permutation, 16);
}

int64_t shared_bytes(const PermuteXArgs &args, int stages) { return stages * args.cols * 2; }

// Splits a row into as many parts as occupy the GPU, each with at least a vector per thread.
cudaError_t launch_rows(PermuteXArgs &args, const LaunchTarget &target) {
  const auto &kernels = kernels_of<PermuteKernels>(*target.family).x_rows;
  const cudaError_t error =
      allow_shared_memory<&PermuteKernels::x_rows>(*target.family, target.device);
  if (error != cudaSuccess) return error;
  const int64_t most_ctas = kRowsCtasPerMultiprocessor * target.device.multiprocessors;
  const int64_t vectors = args.cols / kPermuteColumns;
  const int64_t least_parts = ceil_divide(vectors, kPermuteRowsThreads * kPermuteVectors);
  const int64_t most_parts = ceil_divide(vectors, kPermuteRowsThreads);
  const int64_t parts = std::max(least_parts, std::min(most_parts, most_ctas / args.m));
  args.parts = static_cast<int>(parts);
  args.part_vectors = static_cast<int>(ceil_divide(vectors, parts));
  args.row_step = std::min(args.m, std::max(most_ctas / parts, int64_t{1}));
  const bool ahead = shared_bytes(args, kPermuteStages[1]) <= target.device.shared_bytes;
  const int64_t bytes = shared_bytes(args, kPermuteStages[ahead]);
  return launch({kernels[ahead], args.row_step * parts, kPermuteRowsThreads, target.family->pdl,
                 target.stream, static_cast<int>(bytes)},
                args);
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
  PermuteXArgs args{};
  args.from = static_cast<const uint16_t *>(problem.x);
  args.from_stride = problem.x_stride;
  args.to = static_cast<uint16_t *>(to);
  args.permutation = problem.weight.permutation;
  args.m = problem.m;
  args.cols = problem.weight.cols;
  if (has_whole_vectors(args) &&
      shared_bytes(args, kPermuteStages[0]) <= target.device.shared_bytes)
    return launch_rows(args, target);
  args.parts = static_cast<int>(ceil_divide(args.cols, kPermuteThreads * kPermuteColumns));
  return target.launch(kernels.x, args.m * args.parts, kPermuteThreads, args);
}

}  // namespace nf4::cuda
