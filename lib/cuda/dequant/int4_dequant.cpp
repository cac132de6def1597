// Host side of dequantize of integer weights: validate locations, choose a kernel, launch.
#include "cuda/backend.hpp"
#include "cuda/dequant/int4_args.hpp"
#include "cuda/dequant/int4_choose.hpp"
#include "cuda/dequant/int4_kernels.hpp"
#include "cuda/dequant/tuning.hpp"
#include "cuda/runtime/families.hpp"
#include "cuda/runtime/launch.hpp"
#include "cuda/runtime/locate.hpp"

namespace nf4::cuda {
namespace {

bool forced_any = false;

// What an aligned kernel loads at once, and where its tiles end.
bool has_aligned_parts(const Int4Weight &weight) {
  switch (weight.layout) {
    case NF4_INT4_GPTQ:
      return weight.rows % 4 == 0 && is_multiple(weight.packed, 16) &&
             is_multiple(weight.scales, 8);
    case NF4_INT4_AWQ:
      return is_multiple(weight.scales, 16);
    default:
      return true;
  }
}

int64_t tiles_of(const Int4Weight &weight) {
  const int64_t strips = weight.elements / kInt4StripColumns;
  const int64_t row_strips = weight.cols / kInt4StripColumns;
  switch (weight.layout) {
    case NF4_INT4_GPTQ:
      return ceil_divide(weight.rows, kGptqTileRows) * row_strips;
    case NF4_INT4_AWQ:
      return ceil_divide(weight.rows, kAwqTileRows) * row_strips;
    default:
      return ceil_divide(strips, kRowPackedTileStrips);
  }
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

void set_tiles(const Int4Weight &weight, Int4DequantArgs &args) {
  const int64_t row_strips = weight.cols / kInt4StripColumns;
  args.prefetch = is_multiple(weight.packed, 16);
  args.strips = static_cast<uint32_t>(weight.layout == NF4_INT4_COMPRESSED_TENSORS
                                          ? weight.elements / kInt4StripColumns
                                          : row_strips);
  args.warps = static_cast<uint32_t>(tiles_of(weight));
  args.strip_divisor = WideDivisor::of(row_strips);
  args.group_divisor = WideDivisor::of(weight.group_size / kInt4StripColumns);
  args.groups_divisor = WideDivisor::of(weight.groups);
}

}  // namespace

bool is_aligned(const Int4DequantProblem &problem) {
  const Int4Weight &weight = problem.weight;
  return !forced_any && weight.group_size % kInt4StripColumns == 0 && weight.g_idx == nullptr &&
         weight.permutation == nullptr && weight.elements / kInt4StripColumns < INT32_MAX &&
         is_multiple(problem.out, 16) && has_aligned_parts(weight);
}

void force_int4_dequant_any(bool any) { forced_any = any; }

nf4_status dequant(const Int4DequantProblem &problem, nf4_stream stream) {
  Device device;
  if (const nf4_status status = locate(problem.operands, stream, device)) return status;
  const GpuFamily *family = family_for(device.compute_capability);
  if (family == nullptr) return no_family(device);

  const Int4Weight &weight = problem.weight;
  const auto &kernels = kernels_of<Int4DequantKernels>(*family);
  Int4DequantArgs args = args_of(problem);
  Launch plan{kernels.any[problem.dtype - 1],
              ceil_divide(weight.cols, kInt4AnyColumns) * ceil_divide(weight.rows, kInt4AnyRows),
              kInt4DequantThreads, family->pdl, stream};
  if (is_aligned(problem)) {
    set_tiles(weight, args);
    plan.kernel = kernels.aligned[problem.dtype - 1][weight.layout - 1];
    plan.ctas = ceil_divide(args.warps, kInt4DequantThreads / 32);
  }
  const CurrentDevice current(device.index);
  if (current.error() != cudaSuccess) return fail_cuda(current.error(), "cudaSetDevice");
  const cudaError_t error = launch(plan, args);
  return error == cudaSuccess ? NF4_STATUS_OK : fail_cuda(error, "launching dequantize");
}

}  // namespace nf4::cuda
