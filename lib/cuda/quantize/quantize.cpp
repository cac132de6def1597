// Host side of quantize: validate locations, choose the kernels, launch them in order.
#include "cuda/backend.hpp"
#include "cuda/device.hpp"
#include "cuda/quantize/args.hpp"
#include "nf4_gpu_families.hpp"

namespace nf4::cuda {
namespace {

const QuantizeFamily *family_for(int compute_capability) {
#if NF4_HAVE_BASELINE
  if (kQuantizeBaseline.family.runs_on(compute_capability)) return &kQuantizeBaseline;
#endif
  return nullptr;
}

bool is_multiple(const void *address, int alignment) {
  return reinterpret_cast<uintptr_t>(address) % alignment == 0;
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
  args.aligned = is_multiple(problem.in, 16) && is_multiple(weight.packed, 4);
  args.codebook = weight.codebook;
  if (args.codebook == nullptr)
    args.quantizer =
        make_quantizer(weight.format == NF4_FORMAT_FP4 ? kFp4Codebook.data() : kNf4Codebook.data());
  return args;
}

// The mean of the scales, then their codes: three launches after the weights'.
cudaError_t launch_scales(const QuantizeProblem &problem, const QuantizeFamily &family,
                          cudaStream_t stream) {
  const Weight &weight = problem.weight;
  const QuantizeWorkspace workspace(weight);
  SumArgs sum{};
  sum.scales = static_cast<const float *>(problem.workspace);
  sum.partial_sums = reinterpret_cast<double *>(static_cast<uint8_t *>(problem.workspace) +
                                                workspace.scales_bytes);
  sum.blocks = weight.blocks;
  sum.partials = workspace.partial_sums;
  sum.nested_offset = weight.nested_offset;
  cudaError_t error =
      launch(family.sum_scales, workspace.partial_sums, kQuantizeThreads, sum, stream);
  if (error != cudaSuccess) return error;
  error = launch(family.mean_scale, 1, kQuantizeThreads, sum, stream);
  if (error != cudaSuccess) return error;

  QuantizeScalesArgs scales{};
  scales.scales = sum.scales;
  scales.nested_code = weight.nested_code;
  scales.nested_offset = weight.nested_offset;
  scales.nested_absmax = weight.nested_absmax;
  scales.codes = static_cast<uint8_t *>(weight.absmax);
  scales.blocks = weight.blocks;
  scales.nested_blocks = weight.nested_blocks;
  scales.nested_blocksize_log2 = weight.nested_blocksize_log2;
  const int64_t width =
      weight.nested_blocksize() < kQuantizeThreads ? weight.nested_blocksize() : kQuantizeThreads;
  return launch(family.quantize_scales, ceil_divide(weight.nested_blocks, kQuantizeThreads / width),
                kQuantizeThreads, scales, stream);
}

}  // namespace

nf4_status quantize(const QuantizeProblem &problem, nf4_stream stream) {
  Device device;
  if (const nf4_status status = locate(problem.operands, device)) return status;
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
  return launched(error, "launching quantize", device);
}

}  // namespace nf4::cuda
