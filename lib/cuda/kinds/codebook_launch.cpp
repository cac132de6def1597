// Launches of products of weights with a codebook.
#include <algorithm>

#include "cuda/lora/lora.hpp"
#include "cuda/matmul/kernels.hpp"
#include "cuda/matmul/launch.hpp"
#include "cuda/matmul/mma/launch.hpp"
#include "cuda/matmul/multistage/launch.hpp"
#include "cuda/matmul/skinny/launch.hpp"
#include "cuda/matmul/wgmma/launch.hpp"
#include "cuda/matmul/wgmma/tile.hpp"
#include "cuda/matmul_grouped/launch.hpp"
#include "cuda/runtime/families.hpp"
#include "cuda/runtime/shared_memory.hpp"

namespace nf4::cuda {
namespace {

// The skinny kernels of the layout for a GPU.
const MatmulKernels::Skinny &skinny_of(const MatmulTarget &target, nf4_dtype dtype, int config) {
  return kernels_of<MatmulKernels>(*target.family)
      .skinny[skinny_layout_index(dtype, kMatmulConfigs[config].tile_m, target.gpu)];
}

cudaError_t allow_skinny(const GpuFamily &family, const Device &device) {
  return allow_shared_memory<&MatmulKernels::skinny>(family, device);
}

// Returns the format's codebook as the decoders of kernels that scale weights, or sums, take it.
LutCodebook lut_codebook(const WeightView &weight, nf4_dtype dtype, ScaleOn scale_on) {
  const Format &format = kFormats[weight.format_row];
  LutCodebook codebook{};
  std::copy(format.codebook.begin(), format.codebook.end(), codebook.exact);
  // E2M1 is exact in x's dtype.
  if (weight.scale_bytes != ScaleBytes::kNone) scale_on = ScaleOn::kSums;
  const bool around_one = scale_on == ScaleOn::kWeights && dtype == NF4_DTYPE_FP16;
  codebook.rounded = around_one                      ? format.around_one
                     : scale_on == ScaleOn::kWeights ? format.fp16_with_one
                                                     : rounded_codebook(weight, dtype);
  codebook.scale_factor = around_one ? format.around_one.unit : 1.0f;
  return codebook;
}

}  // namespace

LutCodebook decode_args(const Weight &weight, nf4_dtype dtype, const MatmulConfig &config) {
  return lut_codebook(view_of(weight), dtype, config.scale_on);
}
// All kernels of the gradient scale weights.
LutCodebook decode_args(const TransposedWeight &weight, nf4_dtype dtype, const MatmulConfig &) {
  return lut_codebook(view_of(weight), dtype, ScaleOn::kWeights);
}

// Each K-step is a block, and vectors are aligned.
bool has_scale_vectors(const Weight &weight) {
  return weight.blocksize_log2 == 6 && weight.cols % 512 == 0 &&
         is_multiple(weight.absmax, weight.nested() ? 8 : 16) &&
         (!weight.nested() || weight.nested_blocksize_log2 >= 3);
}

cudaError_t make_weight_map(const Weight &weight, int tile_n, TensorMap &map) {
  return make_tensor_map({weight.packed, weight.rows, weight.cols / 2}, weight.cols / 2, kTileK / 2,
                         tile_n, map);
}

cudaError_t run_mma(const MatmulTarget &target, const MatmulProblem &problem,
                    const MatmulArgs &args) {
  const void *const kernel = kernels_of<MatmulKernels>(*target.family)
                                 .mma[problem.dtype - NF4_DTYPE_FP32][scale_kind(problem.weight)];
  return launch_mma(target, kernel, args);
}

cudaError_t run_skinny(const MatmulTarget &target, const MatmulProblem &problem,
                       const MatmulArgs &args, int config) {
  if (const cudaError_t error = allow_skinny(*target.family, target.device)) return error;
  const MatmulKernels::Skinny &skinny = skinny_of(target, problem.dtype, config);
  const void *const kernel =
      (problem.lora.rank > 0 ? skinny.lora : skinny.one)[problem.dtype - NF4_DTYPE_FP32][scale_kind(
          problem.weight)][config - kFirstSkinny];
  const LoraCtaArgs lora = lora_cta_args(LoraProblem(problem), lora_workspace(problem));
  return launch_skinny(target, kernel, args, lora, problem.dtype, config);
}

cudaError_t run_multistage(const MatmulTarget &target, const MatmulProblem &problem,
                           const MatmulArgs &args, int config) {
  return launch_multistage(target, problem, args,
                           decode_args(problem.weight, problem.dtype, kMatmulConfigs[config]),
                           config);
}

const void *batch_kernel_for(const MatmulTarget &target, const MatmulProblem &problem, int config) {
  if (!is_skinny(config)) return nullptr;
  return skinny_of(target, problem.dtype, config)
      .batch[problem.dtype - NF4_DTYPE_FP32][scale_kind(problem.weight)][config - kFirstSkinny];
}

cudaError_t run_skinny_batch(const MatmulTarget &target, const MatmulArgs *args, int count,
                             const MatmulProblem &first, int config) {
  if (const cudaError_t error = allow_skinny(*target.family, target.device)) return error;
  return launch_skinny_batch(target, batch_kernel_for(target, first, config), args, count,
                             first.dtype, config);
}

cudaError_t load_family_kernels(const GpuFamily &family, const Device &device, const Weight &) {
  cudaError_t error = load_kernels(kernels_of<MatmulKernels>(family));
  if (error == cudaSuccess) error = allow_skinny(family, device);
  return error == cudaSuccess ? load_multistage_kernels<Weight>(family, device) : error;
}

const void *experts_mma_kernel(const GroupedKernels &kernels, const GroupedProblem &problem) {
  return kernels.mma[problem.dtype - NF4_DTYPE_FP16][scale_kind(problem.weight)];
}

}  // namespace nf4::cuda
