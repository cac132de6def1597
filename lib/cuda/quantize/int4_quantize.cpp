// The host side of quantize to integer weights: finds the operands' device, launches the kernel.
#include "core/int4.hpp"
#include "cuda/backend.hpp"
#include "cuda/quantize/int4_args.hpp"
#include "cuda/quantize/int4_kernels.hpp"
#include "cuda/runtime/target.hpp"

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
  const auto launch = [&](const LaunchTarget &target) {
    const Int4QuantizeArgs args = args_of(problem);
    const int64_t tiles = int4_words(args.rows) * args.groups;
    return target.launch(kernels_of<Int4QuantizeKernels>(*target.family).of[problem.dtype - 1],
                         args.cta_tiles ? tiles : ceil_divide(tiles, kInt4QuantizeThreads / 32),
                         kInt4QuantizeThreads, args);
  };
  return launch_on_device(problem.operands, stream, "launching quantize", launch);
}

}  // namespace nf4::cuda
