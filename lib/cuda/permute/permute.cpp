// Host side: reorder of weights, and the columns of x.
#include "cuda/permute/permute.hpp"

#include <algorithm>
#include <iterator>

#include "core/int4.hpp"
#include "cuda/backend.hpp"
#include "cuda/permute/args.hpp"
#include "cuda/permute/kernels.hpp"
#include "cuda/runtime/launch.hpp"
#include "cuda/runtime/locate.hpp"

namespace nf4::cuda {
namespace {

// Fewer rows of x are permuted by many CTAs each, which takes the shortest chain of latencies.
constexpr int64_t kFewRows = 32;

// permute_x_rows may use more shared memory than the default only after this, once a device.
cudaError_t allow_shared_memory(const GpuFamily &family, const Device &device) {
  static ContextFlag known[std::size(kGpuFamilies)];
  ContextFlag &flag = known[&family - kGpuFamilies];
  if (flag.has(device.index)) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernels_of<PermuteKernels>(family).x_rows,
                           cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_bytes);
  if (error == cudaSuccess) flag.set(device.index);
  return error;
}

cudaError_t launch_reorder(const Int4ReorderProblem &problem, const GpuFamily &family,
                           cudaStream_t stream) {
  const PermuteKernels &kernels = kernels_of<PermuteKernels>(family);
  const Int4Weight &weight = problem.from;
  const SortColumnsArgs sort{weight.g_idx, problem.permutation, weight.cols};
  const cudaError_t error = launch({kernels.sort, ceil_divide(weight.cols, kPermuteThreads),
                                    kPermuteThreads, family.pdl, stream},
                                   sort);
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
  return launch({kernels.codes, ceil_divide(codes.words, kPermuteThreads), kPermuteThreads,
                 family.pdl, stream},
                codes);
}

}  // namespace

nf4_status reorder(const Int4ReorderProblem &problem, nf4_stream stream) {
  Device device;
  if (const nf4_status status = locate(problem.operands, stream, device)) return status;
  const GpuFamily *family = family_for(device.compute_capability);
  if (family == nullptr) return no_family(device);
  const CurrentDevice current(device.index);
  if (current.error() != cudaSuccess) return fail_cuda(current.error(), "cudaSetDevice");
  const cudaError_t error = launch_reorder(problem, *family, stream);
  return error == cudaSuccess ? NF4_STATUS_OK : fail_cuda(error, "launching reorder");
}

cudaError_t permute_x(const Int4MatmulProblem &problem, void *to, const GpuFamily &family,
                      const Device &device, cudaStream_t stream) {
  const PermuteKernels &kernels = kernels_of<PermuteKernels>(family);
  const int64_t cols = problem.weight.cols, staged_bytes = cols * kPermuteRows * 2;
  PermuteXArgs args{};
  args.from = static_cast<const uint16_t *>(problem.x);
  args.from_stride = problem.x_stride;
  args.to = static_cast<uint16_t *>(to);
  args.permutation = problem.weight.permutation;
  args.m = problem.m;
  args.cols = cols;
  const bool pairs = is_multiple(problem.x, 4) && problem.x_stride % 2 == 0 && cols % 8 == 0;
  if (problem.m > kFewRows && pairs && staged_bytes <= device.shared_bytes) {
    if (const cudaError_t error = allow_shared_memory(family, device)) return error;
    return launch({kernels.x_rows, ceil_divide(args.m, kPermuteRows), kPermuteRowsThreads,
                   family.pdl, stream, static_cast<int>(staged_bytes)},
                  args);
  }
  args.row_ctas = static_cast<int>(std::min<int64_t>(ceil_divide(cols, kPermuteThreads * 8), 64));
  return launch({kernels.x, args.m * args.row_ctas, kPermuteThreads, family.pdl, stream}, args);
}

}  // namespace nf4::cuda
