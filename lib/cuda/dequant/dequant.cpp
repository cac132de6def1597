// The host side of dequantize: finds the operands' device, chooses a kernel, launches it.
#include "cuda/backend.hpp"
#include "cuda/dequant/choose.hpp"
#include "cuda/dequant/kernels.hpp"
#include "cuda/dequant/tuning.hpp"
#include "cuda/runtime/target.hpp"

namespace nf4::cuda {
namespace {

std::optional<DequantConfig> forced_config;

}  // namespace

DequantArgs dequant_args(const DequantProblem &problem) {
  const Weight &weight = problem.weight;
  const int item = element_bytes(problem.dtype);
  DequantArgs args{};
  args.weight = view_of(weight);
  args.out = problem.out;
  args.elements = weight.elements;
  args.blocks = weight.blocks;
  args.shift = static_cast<int>(reinterpret_cast<uintptr_t>(problem.out) % 16 / item);
  args.keep_output = weight.elements * item <= kH200Dequant.limits(item).keep_output_up_to;
  args.prefetch = is_multiple(weight.packed, 16) && is_multiple(weight.absmax, 16);
  return args;
}

DequantConfig choose_dequant(const DequantProblem &problem) {
  if (!is_multiple(problem.out, 16) || !is_multiple(problem.weight.packed, 4)) return kUnaligned;
  // A warp has a lane for each scale of a tile.
  if (problem.weight.blocksize() < kMinBlocksize) return kWarpTile512;
  if (forced_config.has_value()) return *forced_config;
  const DequantTuning::Limits &limits = kH200Dequant.limits(element_bytes(problem.dtype));
  const int64_t elements = problem.weight.elements;
  return elements > limits.warp_tile_1024_above && elements <= limits.warp_tile_1024_up_to
             ? kWarpTile1024
             : kWarpTile512;
}

void force_dequant(std::optional<DequantConfig> config) { forced_config = config; }

nf4_status dequant(const DequantProblem &problem, nf4_stream stream) {
  const auto launch = [&](const LaunchTarget &target) {
    const DequantArgs args = dequant_args(problem);
    const DequantConfig config = choose_dequant(problem);
    const DequantTiling tiling = dequant_tiling(config);
    const auto &kernels = kernels_of<DequantKernels>(*target.family).of;
    return target.launch(kernels[problem.dtype - 1][scale_kind(problem.weight)][config],
                         ceil_divide(args.elements + args.shift, tiling.cta_tile()), tiling.threads,
                         args);
  };
  return launch_on_device(problem.operands, stream, "launching dequantize", launch);
}

}  // namespace nf4::cuda
