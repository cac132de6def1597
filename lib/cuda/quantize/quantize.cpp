// The host side of quantize: finds the operands' device, chooses the kernels, launches them in
// order.
#include <algorithm>

#include "cuda/backend.hpp"
#include "cuda/quantize/args.hpp"
#include "cuda/quantize/kernels.hpp"
#include "cuda/runtime/target.hpp"

namespace nf4::cuda {
namespace {

float *scales_of(const QuantizeProblem &problem) {
  return static_cast<float *>(problem.weight.nested() ? problem.workspace : problem.weight.absmax);
}

// The first level of partial sums, in the workspace; NULL if flat.
double *partial_sums_of(const QuantizeProblem &problem) {
  if (!problem.weight.nested()) return nullptr;
  return reinterpret_cast<double *>(static_cast<char *>(problem.workspace) +
                                    QuantizeWorkspace(problem.weight).scales_bytes);
}

QuantizeArgs weights_args(const QuantizeProblem &problem) {
  const Weight &weight = problem.weight;
  QuantizeArgs args{};
  args.in = problem.in;
  args.packed = weight.packed;
  args.scales = scales_of(problem);
  args.partial_sums = partial_sums_of(problem);
  args.elements = weight.elements;
  args.blocksize_log2 = weight.blocksize_log2;
  args.aligned = is_multiple(problem.in, 16) && is_multiple(weight.packed, 4);
  args.codebook = weight.codebook;
  args.format_row = static_cast<uint8_t>(format_row(weight.format));
  return args;
}

const QuantizeKernels &kernels_on(const LaunchTarget &target) {
  return kernels_of<QuantizeKernels>(*target.family);
}

cudaError_t launch_weights(const QuantizeProblem &problem, const LaunchTarget &target) {
  const bool callers_codebook = problem.weight.codebook != nullptr;
  return target.launch(kernels_on(target).weights[problem.dtype - 1][callers_codebook],
                       ceil_divide(problem.weight.elements, kQuantizeCtaTile), kQuantizeThreads,
                       weights_args(problem));
}

// Adds up partial sums until one CTA can add up the remaining ones.
cudaError_t launch_sums(const LaunchTarget &target, SumArgs &sums) {
  cudaError_t error = cudaSuccess;
  while (error == cudaSuccess && sums.count > kSumsPerSum) {
    const int64_t ctas = ceil_divide(sums.count, kSumsPerSum);
    error = target.launch(kernels_on(target).sums, ctas, kScalesThreads, sums);
    sums = {sums.out, sums.out + ctas, ctas};
  }
  return error;
}

// Computes the mean of the scales, then their codes.
cudaError_t launch_scales(const QuantizeProblem &problem, const LaunchTarget &target) {
  const Weight &weight = problem.weight;
  double *first = partial_sums_of(problem);
  const int64_t count = ceil_divide(weight.elements, kQuantizeCtaTile);
  SumArgs sums{first, first + count, count};
  const cudaError_t error = launch_sums(target, sums);
  if (error != cudaSuccess) return error;

  QuantizeScalesArgs args{};
  args.scales = scales_of(problem);
  args.sums = sums.sums;
  args.sums_count = sums.count;
  args.nested_code = weight.nested_code;
  args.nested_offset = weight.nested_offset;
  args.nested_absmax = weight.nested_absmax;
  args.codes = static_cast<uint8_t *>(weight.absmax);
  args.codes_aligned = is_multiple(weight.absmax, 8);
  args.blocks = weight.blocks;
  args.nested_blocks = weight.nested_blocks;
  args.nested_blocksize_log2 = weight.nested_blocksize_log2;
  // Chunks go to different multiprocessors as long as there are any.
  const int64_t work = weight.nested_blocksize_log2 <= kChunkLog2
                           ? ceil_divide(weight.blocks, int64_t{1} << kChunkLog2)
                           : weight.nested_blocks;
  return target.launch(kernels_on(target).scales,
                       std::min<int64_t>(work, target.device.multiprocessors), kScalesThreads,
                       args);
}

cudaError_t launch_e2m1(const QuantizeProblem &problem, const LaunchTarget &target) {
  const Weight &weight = problem.weight;
  E2m1QuantizeArgs args{};
  args.weight = view_of(weight);
  args.in = problem.in;
  args.packed = weight.packed;
  args.scales = static_cast<uint8_t *>(weight.absmax);
  args.elements = weight.elements;
  args.scale_rule = weight.scale_rule;
  args.aligned = is_multiple(problem.in, 16) && is_multiple(weight.packed, 4);
  return target.launch(kernels_on(target).e2m1[problem.dtype - 1],
                       ceil_divide(weight.elements, int64_t{kQuantizeThreads} * 8),
                       kQuantizeThreads, args);
}

}  // namespace

nf4_status quantize(const QuantizeProblem &problem, nf4_stream stream) {
  const auto launch = [&](const LaunchTarget &target) {
    if (problem.weight.has_scale_bytes()) return launch_e2m1(problem, target);
    const cudaError_t error = launch_weights(problem, target);
    if (error != cudaSuccess || !problem.weight.nested()) return error;
    return launch_scales(problem, target);
  };
  return launch_on_device(problem.operands, stream, "launching quantize", launch);
}

}  // namespace nf4::cuda
