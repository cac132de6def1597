#include "cuda/matmul/skinny/launch.hpp"

#include <algorithm>
#include <climits>

#include "cuda/matmul/skinny/partition.hpp"
#include "cuda/matmul/skinny/plan_work.hpp"
#include "cuda/runtime/launch.hpp"

namespace nf4::cuda {
namespace {

// Prefetched into L2 before the kernel's own copies, which wait for its first small loads.
int prefetch_bytes(int64_t cta_bytes) {
  const CostModel &model = cost_model();
  if (cta_bytes > model.skinny_prefetch_max_bytes) return 0;
  return static_cast<int>(std::min(cta_bytes, model.skinny_prefetch_bytes) / 16 * 16);
}

// Fills in how `ctas` CTAs share the work; returns the bytes of shared memory.
int plan_ctas(const SkinnyLayout &layout, int max_m, int64_t ctas, const GpuFacts &gpu,
              SkinnyArgs &args) {
  const MatmulArgs &matmul = args.matmul;
  plan_work(matmul.weight.rows, matmul.weight.cols, ctas, layout, args.work);
  args.work.prefetch_bytes = prefetch_bytes(args.work.cta_units * matmul.weight.cols / 2);
  const int64_t tiles = ceil_divide(ceil_divide(matmul.weight.rows, ctas), kWarpTileN);
  return plan_skinny_smem(layout, max_m, tiles, gpu, args);
}

SkinnyLayout layout_of(const MatmulTarget &target, nf4_dtype dtype, int config) {
  return skinny_layout(dtype, kMatmulConfigs[config].tile_m, target.gpu);
}

cudaError_t skinny_args(const MatmulTarget &target, const MatmulArgs &matmul, nf4_dtype dtype,
                        int config, int64_t ctas, SkinnyArgs &args, int &smem_bytes) {
  args.matmul = matmul;
  args.codebook = rounded_codebook(matmul.weight, dtype);
  smem_bytes = plan_ctas(layout_of(target, dtype, config), kMatmulConfigs[config].tile_m, ctas,
                         target.gpu, args);
  if (!target.gpu.tensor_maps) return cudaSuccess;
  return make_tensor_map({matmul.weight.packed, matmul.weight.rows, matmul.weight.cols / 2},
                         matmul.weight.cols / 2, kWarpTileK / 2, kWarpTileN, args.packed);
}

}  // namespace

int plan_skinny_smem(const SkinnyLayout &layout, int max_m, int64_t tiles, const GpuFacts &gpu,
                     SkinnyArgs &args) {
  const SkinnySmem smem = skinny_smem(layout, max_m, gpu.tensor_maps);
  const MatmulArgs &matmul = args.matmul;
  SkinnyWork &work = args.work;
  args.scale_pitch = static_cast<int>(skinny_scale_pitch(work.k_tiles));
  args.item_step = work.n_warps * kWarpTileN * args.scale_pitch;
  args.element_step = work.n_warps * kWarpTileN * static_cast<int>(matmul.weight.cols);
  args.row_step = 32 * layout.warps / work.k_tiles;
  args.k_tile_step = 32 * layout.warps % work.k_tiles;
  args.whole_items =
      (matmul.weight.blocksize_log2 == 6 || matmul.weight.scale_bytes != ScaleBytes::kNone) &&
      matmul.weight.cols % kWarpTileK == 0 &&
      is_multiple(matmul.weight.absmax, skinny_item_bytes(matmul.weight));

  const SkinnyScaleBytes scales = skinny_scale_bytes(matmul.weight);
  const int64_t lora_bytes = shared_lora_bytes(matmul.m, args.lora.stride);
  work.group_tiles =
      even_groups(tiles, skinny_tiles_that_fit(smem, scales, gpu.shared_bytes - lora_bytes));
  args.smem_scale_code = smem.partials + work.group_tiles * smem.tile_partials;
  args.smem_nested_absmax = args.smem_scale_code + static_cast<int>(scales.code);
  args.smem_scales = static_cast<int>(
      ceil_divide(args.smem_nested_absmax + work.group_tiles * scales.nested + 4, 16) * 16);
  args.smem_lora = args.smem_scales + static_cast<int>(work.group_tiles * scales.items);
  return args.smem_lora + static_cast<int>(lora_bytes);
}

cudaError_t launch_skinny(const MatmulTarget &target, const void *kernel, const MatmulArgs &matmul,
                          const LoraCtaArgs &lora, nf4_dtype dtype, int config) {
  SkinnyArgs args{};
  args.lora = lora;
  const int64_t ctas =
      std::min(matmul.weight.rows, weight_ctas(target.gpu.multiprocessors, lora.ctas));
  int smem_bytes = 0;
  const cudaError_t error = skinny_args(target, matmul, dtype, config, ctas, args, smem_bytes);
  if (error != cudaSuccess) return error;
  return launch({kernel, lora.ctas + ctas, 32 * layout_of(target, dtype, config).warps,
                 target.family->pdl, target.stream, smem_bytes},
                args);
}

bool joins_launch(const SkinnyBatchProblems<Weight> &problems, const MatmulProblem &problem,
                  const GpuFacts &gpu) {
  if (problems.count == kSkinnyBatchMax || gpu.multiprocessors <= kSkinnyBatchMax) return false;
  int64_t elements = problem.weight.elements;
  for (int i = 0; i < problems.count; ++i) elements += problems.list[i]->weight.elements;
  // Half of what a CTA may have, since no share is exactly the mean.
  return elements <= (gpu.multiprocessors - kSkinnyBatchMax) * (kSkinnyElementsMax / 2);
}

cudaError_t launch_skinny_batch(const MatmulTarget &target, const void *kernel,
                                const MatmulArgs *matmuls, int count, nf4_dtype dtype, int config) {
  SkinnyBatch batch{};
  int64_t ctas[kSkinnyBatchMax], first_cta = 0;
  int smem_bytes = 0;
  WeightSize sizes[kSkinnyBatchMax];
  for (int i = 0; i < count; ++i) sizes[i] = {matmuls[i].weight.rows, matmuls[i].weight.cols};
  partition_ctas(sizes, count, target.gpu.multiprocessors, ctas);
  for (int i = 0; i < count; ++i) {
    int own_bytes = 0;
    const cudaError_t error =
        skinny_args(target, matmuls[i], dtype, config, ctas[i], batch.problems[i], own_bytes);
    if (error != cudaSuccess) return error;
    smem_bytes = std::max(smem_bytes, own_bytes);
    batch.first_cta[i] = static_cast<int>(first_cta);
    first_cta += ctas[i];
  }
  std::fill(batch.first_cta + count, batch.first_cta + kSkinnyBatchMax, INT_MAX);
  return launch({kernel, first_cta, 32 * layout_of(target, dtype, config).warps, target.family->pdl,
                 target.stream, smem_bytes},
                batch);
}

}  // namespace nf4::cuda
