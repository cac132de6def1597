// Host side of dequantize: validate locations, choose a kernel, launch.
#include "cuda/backend.hpp"
#include "cuda/dequant/select.hpp"
#include "cuda/runtime/launch.hpp"
#include "cuda/runtime/locate.hpp"
#include "nf4_gpu_families.hpp"

namespace nf4::cuda {
namespace {

// The compile matrix of this operation: 3 dtypes x flat/nested x 3 shapes each.
const DequantFamily *const kFamilies[] = {
#if NF4_HAVE_SM90
    &kDequantSm90,
#endif
#if NF4_HAVE_SM80
    &kDequantSm80,
#endif
#if NF4_HAVE_SM75
    &kDequantSm75,
#endif
    nullptr,
};

const DequantFamily *forced_family = nullptr;
const DequantShape *forced_shape = nullptr;

// Outputs of which a reader finds enough in the L2 of an H200 to make up for what normal stores
// cost: 2 to 4 microseconds for it, up to the 88 MiB that were measured, against 1% of
// dequantize in 16 bits, and 4 to 6% in 32.
constexpr int64_t keep_output_up_to(int element_bytes) {
  return int64_t{element_bytes == 4 ? 48 : 96} << 20;
}

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
  args.keep_output = weight.elements * item <= keep_output_up_to(item);
  args.prefetch = is_multiple(weight.packed, 16) && is_multiple(weight.absmax, 16);
  return args;
}

DequantShape dequant_shape(const DequantProblem &problem) {
  if (!is_multiple(problem.out, 16) || !is_multiple(problem.weight.packed, 4)) return kUnaligned;
  if (forced_shape != nullptr) return *forced_shape;
  const ElementRange tall = tall_range(element_bytes(problem.dtype));
  const int64_t elements = problem.weight.elements;
  return elements > tall.above && elements <= tall.up_to ? kTall : kWide;
}

const DequantFamily *const *dequant_families() { return kFamilies; }

cudaError_t load_dequant_kernels(const DequantFamily &family) {
  return load_kernels(&family.kernels[0][0][0], 3 * 2 * kDequantShapes);
}

void force_dequant(const DequantFamily *family, const DequantShape *shape) {
  forced_family = family;
  forced_shape = shape;
}

const DequantFamily *dequant_family_for(int compute_capability) {
  if (forced_family != nullptr) return forced_family;
  for (const DequantFamily *const *family = kFamilies; *family != nullptr; ++family)
    if ((*family)->family.runs_on(compute_capability)) return *family;
  return nullptr;
}

nf4_status dequant(const DequantProblem &problem, nf4_stream stream) {
  Device device;
  if (const nf4_status status = locate(problem.operands, stream, device)) return status;
  const DequantFamily *family = dequant_family_for(device.compute_capability);
  if (family == nullptr) return no_family(device);

  const DequantArgs args = dequant_args(problem);
  const DequantShape shape = dequant_shape(problem);
  const DequantLayout layout = dequant_layout(shape);
  const CurrentDevice current(device.index);
  if (current.error() != cudaSuccess) return fail_cuda(current.error(), "cudaSetDevice");
  const cudaError_t error =
      launch({family->kernels[problem.dtype - 1][problem.weight.nested()][shape],
              ceil_divide(args.elements + args.shift, layout.elements()), layout.threads,
              family->family.pdl, stream},
             args);
  return error == cudaSuccess ? NF4_STATUS_OK : fail_cuda(error, "launching dequantize");
}

}  // namespace nf4::cuda
