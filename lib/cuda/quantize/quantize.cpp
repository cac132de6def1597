// Host side of quantize: validate locations, choose the kernels, launch them in order.
#include <algorithm>

#include "cuda/backend.hpp"
#include "cuda/quantize/args.hpp"
#include "cuda/quantize/select.hpp"
#include "cuda/runtime/launch.hpp"
#include "cuda/runtime/locate.hpp"
#include "nf4_gpu_families.hpp"

namespace nf4::cuda {
namespace {

// The compile matrix of this operation: 3 dtypes x the formats' codebooks or the caller's.
const QuantizeFamily *const kFamilies[] = {
#if NF4_HAVE_SM90
    &kQuantizeSm90,
#endif
#if NF4_HAVE_SM80
    &kQuantizeSm80,
#endif
#if NF4_HAVE_SM75
    &kQuantizeSm75,
#endif
    nullptr,
};

const QuantizeFamily *forced_family = nullptr;

const QuantizeFamily *family_for(int compute_capability) {
  if (forced_family != nullptr) return forced_family;
  for (const QuantizeFamily *const *family = kFamilies; *family != nullptr; ++family)
    if ((*family)->family.runs_on(compute_capability)) return *family;
  return nullptr;
}

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
  args.format = weight.format;
  return args;
}

cudaError_t launch_weights(const QuantizeProblem &problem, const QuantizeFamily &family,
                           cudaStream_t stream) {
  const bool own_codebook = problem.weight.codebook != nullptr;
  return launch({family.weights[problem.dtype - 1][own_codebook],
                 ceil_divide(problem.weight.elements, kQuantizeElementsPerBlock), kQuantizeThreads,
                 family.family.pdl, stream},
                weights_args(problem));
}

// Adds up partial sums until a thread block can do the rest: what is left of them.
cudaError_t launch_sums(const QuantizeFamily &family, cudaStream_t stream, SumArgs &sums) {
  cudaError_t error = cudaSuccess;
  while (error == cudaSuccess && sums.count > kSumsPerSum) {
    const int64_t blocks = ceil_divide(sums.count, kSumsPerSum);
    error = launch({family.reduce_sums, blocks, kScalesThreads, family.family.pdl, stream}, sums);
    sums = {sums.out, sums.out + blocks, blocks};
  }
  return error;
}

// The mean of the scales, then their codes.
cudaError_t launch_scales(const QuantizeProblem &problem, const QuantizeFamily &family,
                          const Device &device, cudaStream_t stream) {
  const Weight &weight = problem.weight;
  double *first = partial_sums_of(problem);
  const int64_t count = ceil_divide(weight.elements, kQuantizeElementsPerBlock);
  SumArgs sums{first, first + count, count};
  const cudaError_t error = launch_sums(family, stream, sums);
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
  return launch({family.quantize_scales, std::min<int64_t>(work, device.multiprocessors),
                 kScalesThreads, family.family.pdl, stream},
                args);
}

}  // namespace

const QuantizeFamily *const *quantize_families() { return kFamilies; }

void force_quantize(const QuantizeFamily *family) { forced_family = family; }

cudaError_t load_quantize_kernels(int compute_capability) {
  const QuantizeFamily *family = family_for(compute_capability);
  if (family == nullptr) return cudaSuccess;
  const void *const rest[] = {family->reduce_sums, family->quantize_scales};
  const cudaError_t error = load_kernels(&family->weights[0][0], 3 * 2);
  return error == cudaSuccess ? load_kernels(rest, 2) : error;
}

nf4_status quantize(const QuantizeProblem &problem, nf4_stream stream) {
  Device device;
  if (const nf4_status status = locate(problem.operands, stream, device)) return status;
  const QuantizeFamily *family = family_for(device.compute_capability);
  if (family == nullptr) return no_family(device);

  const CurrentDevice current(device.index);
  if (current.error() != cudaSuccess) return fail_cuda(current.error(), "cudaSetDevice");
  cudaError_t error = launch_weights(problem, *family, stream);
  if (error == cudaSuccess && problem.weight.nested())
    error = launch_scales(problem, *family, device, stream);
  return error == cudaSuccess ? NF4_STATUS_OK : fail_cuda(error, "launching quantize");
}

}  // namespace nf4::cuda
