// Host side of quantize to integer weights: validate locations, launch.
#include "core/int4.hpp"
#include "cuda/backend.hpp"
#include "cuda/quantize/int4_args.hpp"
#include "cuda/quantize/int4_kernels.hpp"
#include "cuda/runtime/families.hpp"
#include "cuda/runtime/launch.hpp"
#include "cuda/runtime/locate.hpp"

namespace nf4::cuda {
namespace {

Int4QuantizeArgs args_of(const Int4QuantizeProblem &problem) {
  const Int4Weight &weight = problem.weight;
  Int4QuantizeArgs args{};
  args.in = problem.in;
  args.packed = weight.packed;
  args.scales = static_cast<uint16_t *>(weight.scales);
  args.zeros = weight.zeros;
  args.rows = weight.rows;
  args.cols = weight.cols;
  args.group_size = weight.group_size;
  args.groups = weight.groups;
  args.zero_offset = weight.zero_offset;
  args.layout = weight.layout;
  args.scales_dtype = weight.scales_dtype;
  args.symmetric = problem.symmetric;
  args.aligned = is_multiple(problem.in, 16) && weight.cols % 8 == 0;
  args.cta_tiles = weight.group_size >= kInt4CtaTilesFrom;
  return args;
}

}  // namespace

nf4_status quantize(const Int4QuantizeProblem &problem, nf4_stream stream) {
  Device device;
  if (const nf4_status status = locate(problem.operands, stream, device)) return status;
  const GpuFamily *family = family_for(device.compute_capability);
  if (family == nullptr) return no_family(device);

  const Int4QuantizeArgs args = args_of(problem);
  const int64_t tiles = int4_words(args.rows) * args.groups;
  const CurrentDevice current(device.index);
  if (current.error() != cudaSuccess) return fail_cuda(current.error(), "cudaSetDevice");
  const cudaError_t error =
      launch({kernels_of<Int4QuantizeKernels>(*family).of[problem.dtype - 1],
              args.cta_tiles ? tiles : ceil_divide(tiles, kInt4QuantizeThreads / 32),
              kInt4QuantizeThreads, family->pdl, stream},
             args);
  return error == cudaSuccess ? NF4_STATUS_OK : fail_cuda(error, "launching quantize");
}

}  // namespace nf4::cuda
