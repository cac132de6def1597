// The host side of dequantize of integer weights: finds the operands' device, chooses a kernel,
// launches it.
#include <algorithm>

#include "cuda/backend.hpp"
#include "cuda/dequant/int4_args.hpp"
#include "cuda/dequant/int4_choose.hpp"
#include "cuda/dequant/int4_kernels.hpp"
#include "cuda/dequant/tuning.hpp"
#include "cuda/runtime/target.hpp"

namespace nf4::cuda {
namespace {

bool forced_any = false;

constexpr int64_t kPrefetchBytes = 4 << 20;

constexpr const Int4Tiling &tiling_of(nf4_int4_layout layout) {
  return layout == NF4_INT4_GPTQ  ? kGptqTiling
         : layout == NF4_INT4_AWQ ? kAwqTiling
                                  : kRowPackedTiling;
}

Int4DequantArgs args_of(const Int4DequantProblem &problem) {
  const Int4Weight &weight = problem.weight;
  const int item = element_bytes(problem.dtype);
  Int4DequantArgs args{};
  args.weight = view_of(weight);
  args.out = problem.out;
  args.keep_output = weight.elements * item <= kH200Dequant.limits(item).keep_output_up_to;
  return args;
}

// Sets the tiles of an aligned kernel; returns the number of its CTAs.
int64_t set_tiles(const Int4Weight &weight, Int4DequantArgs &args) {
  const Int4Tiling &tiling = tiling_of(weight.layout);
  args.group_divisor = WideDivisor::of(weight.group_size / kInt4StripColumns);
  if (weight.layout == NF4_INT4_COMPRESSED_TENSORS) {
    args.groups_divisor = WideDivisor::of(weight.groups);
    args.strips = static_cast<uint32_t>(weight.elements / kInt4StripColumns);
    args.prefetch = kPrefetchBytes / 4;
    return ceil_divide(weight.elements, tiling.columns);
  }
  const int64_t column_tiles = ceil_divide(weight.cols, tiling.columns);
  args.column_tiles = static_cast<uint32_t>(column_tiles);
  args.tile_divisor = WideDivisor::of(column_tiles);
  // The distance is whole tiles, so that prefetched data lies beside loaded data.
  args.prefetch = ceil_divide(kPrefetchBytes, weight.cols * tiling.rows / 2) * tiling.rows;
  return column_tiles * ceil_divide(weight.rows, tiling.rows);
}

}  // namespace

bool is_aligned(const Int4DequantProblem &problem) {
  return !forced_any && can_align(problem.weight) && is_multiple(problem.out, 16);
}

void force_int4_dequant_any(bool any) { forced_any = any; }

nf4_status dequant(const Int4DequantProblem &problem, nf4_stream stream) {
  const auto launch = [&](const LaunchTarget &target) {
    const Int4Weight &weight = problem.weight;
    const auto &kernels = kernels_of<Int4DequantKernels>(*target.family);
    Int4DequantArgs args = args_of(problem);
    if (is_aligned(problem)) {
      const int64_t ctas = set_tiles(weight, args);
      return target.launch(kernels.aligned[problem.dtype - 1][weight.layout - 1], ctas,
                           tiling_of(weight.layout).threads, args);
    }
    return target.launch(
        kernels.any[problem.dtype - 1],
        ceil_divide(weight.cols, kInt4AnyColumns) * ceil_divide(weight.rows, kInt4AnyRows),
        kInt4AnyThreads, args);
  };
  return launch_on_device(problem.operands, stream, "launching dequantize", launch);
}

}  // namespace nf4::cuda
