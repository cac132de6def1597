// Host side of quantize: validate locations, choose the kernels, launch them in order.
#include <algorithm>
#include <iterator>

#include "cuda/backend.hpp"
#include "cuda/device.hpp"
#include "cuda/quantize/args.hpp"
#include "cuda/quantize/select.hpp"
#include "nf4_gpu_families.hpp"

namespace nf4::cuda {
namespace {

const QuantizeFamily *family_for(int compute_capability) {
#if NF4_HAVE_BASELINE
  if (kQuantizeBaseline.family.runs_on(compute_capability)) return &kQuantizeBaseline;
#endif
  return nullptr;
}

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

QuantizeArgs weights_args(const QuantizeProblem &problem) {
  const Weight &weight = problem.weight;
  QuantizeArgs args{};
  args.in = problem.in;
  args.packed = weight.packed;
  args.scales = static_cast<float *>(weight.nested() ? problem.workspace : weight.absmax);
  args.elements = weight.elements;
  args.blocks = weight.blocks;
  args.blocksize_log2 = weight.blocksize_log2;
  args.aligned = is_multiple(problem.in, 16) && is_multiple(weight.packed, 8);
  args.codebook = weight.codebook;
  args.format = weight.format;
  return args;
}

// The sum of the scales down to a thread block's worth of partial sums, of which
// *sums_count are left.
cudaError_t launch_sums(const QuantizeFamily &family, SumArgs args, int64_t *sums_count,
                        cudaStream_t stream) {
  int64_t left = ceil_divide(args.count, kScalesPerPartialSum);
  cudaError_t error = launch(family.sum_scales, left, kQuantizeThreads, args, stream);
  while (error == cudaSuccess && left > kScalesPerPartialSum) {
    args.count = left;
    error = launch(family.reduce_sums, 1, kQuantizeThreads, args, stream);
    left = ceil_divide(left, kScalesPerPartialSum);
  }
  *sums_count = left;
  return error;
}

// The mean of the scales, then their codes.
cudaError_t launch_scales(const QuantizeProblem &problem, const QuantizeFamily &family,
                          cudaStream_t stream) {
  const Weight &weight = problem.weight;
  auto *workspace = static_cast<uint8_t *>(problem.workspace);
  const auto *scales = reinterpret_cast<const float *>(workspace);
  auto *sums = reinterpret_cast<double *>(workspace + QuantizeWorkspace(weight).scales_bytes);
  int64_t sums_count = 0;
  const cudaError_t error = launch_sums(family, {scales, sums, weight.blocks}, &sums_count, stream);
  if (error != cudaSuccess) return error;

  QuantizeScalesArgs args{};
  args.scales = scales;
  args.sums = sums;
  args.sums_count = static_cast<int>(sums_count);
  args.nested_code = weight.nested_code;
  args.nested_offset = weight.nested_offset;
  args.nested_absmax = weight.nested_absmax;
  args.codes = static_cast<uint8_t *>(weight.absmax);
  args.blocks = weight.blocks;
  args.nested_blocks = weight.nested_blocks;
  args.nested_blocksize_log2 = weight.nested_blocksize_log2;
  const int64_t width = std::min<int64_t>(weight.nested_blocksize(), kQuantizeThreads);
  return launch(family.quantize_scales, ceil_divide(weight.nested_blocks, kQuantizeThreads / width),
                kQuantizeThreads, args, stream);
}

}  // namespace

cudaError_t load_quantize_kernels(int compute_capability) {
  const QuantizeFamily *family = family_for(compute_capability);
  if (family == nullptr) return cudaSuccess;
  const void *const kernels[] = {family->weights[0], family->weights[1],  family->weights[2],
                                 family->sum_scales, family->reduce_sums, family->quantize_scales};
  return load_kernels(kernels, static_cast<int>(std::size(kernels)));
}

nf4_status quantize(const QuantizeProblem &problem, nf4_stream stream) {
  Device device;
  if (const nf4_status status = locate(problem.operands, stream, device)) return status;
  const QuantizeFamily *family = family_for(device.compute_capability);
  if (family == nullptr) return no_family(device);

  const CurrentDevice current(device.index);
  if (current.error() != cudaSuccess) return fail_cuda(current.error(), "cudaSetDevice");
  const QuantizeArgs args = weights_args(problem);
  cudaError_t error =
      launch(family->weights[problem.dtype - 1],
             ceil_divide(args.elements, kQuantizeElementsPerBlock), kQuantizeThreads, args, stream);
  if (error == cudaSuccess && problem.weight.nested())
    error = launch_scales(problem, *family, stream);
  return error == cudaSuccess ? NF4_STATUS_OK : fail_cuda(error, "launching quantize");
}

}  // namespace nf4::cuda
