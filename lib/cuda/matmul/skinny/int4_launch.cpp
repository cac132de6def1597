// Launches of the skinny kernels of integer weights.
#include <algorithm>

#include "cuda/matmul/kernels.hpp"
#include "cuda/matmul/skinny/launch.hpp"
#include "cuda/matmul/skinny/plan_work.hpp"
#include "cuda/matmul/skinny/strip_args.hpp"
#include "cuda/matmul/skinny/strip_plan.hpp"
#include "cuda/runtime/families.hpp"
#include "cuda/runtime/launch.hpp"

namespace nf4::cuda {
namespace {

// Returns the rows of the weight in a unit. Aligned boxes are best for GPTQ, if there are enough of
// them for all CTAs.
int unit_rows(const Int4View &weight, const GpuFacts &gpu) {
  const bool aligned =
      weight.layout == NF4_INT4_GPTQ && weight.rows >= int64_t{kWarpTileN} * gpu.multiprocessors;
  return aligned ? kWarpTileN : kInt4Unit;
}

// Fills in how `ctas` CTAs share the work; returns the bytes of shared memory.
int plan_ctas(const SkinnySmem &smem, int64_t ctas, const GpuFacts &gpu, Int4SkinnyArgs &args) {
  const Int4View &weight = args.matmul.weight;
  const int64_t units = ceil_divide(weight.rows, args.unit_rows);
  plan_work(units, weight.cols, ctas, kInt4Layout, args.work);
  const int64_t tiles = ceil_divide(ceil_divide(units, ctas) * args.unit_rows, kWarpTileN);
  return plan_int4_skinny_smem(smem, tiles, gpu, args);
}

cudaError_t launch_rows(const MatmulTarget &target, const void *kernel,
                        const Int4MatmulArgs &matmul, int max_m) {
  Int4SkinnyArgs args{};
  args.matmul = matmul;
  args.unit_rows = unit_rows(matmul.weight, target.gpu);
  const int64_t ctas = std::min<int64_t>(ceil_divide(matmul.weight.rows, args.unit_rows),
                                         target.gpu.multiprocessors);
  const bool tensor_maps = target.gpu.tensor_maps;
  const int smem_bytes = plan_ctas(int4_skinny_smem(max_m), ctas, target.gpu, args);
  if (tensor_maps) {
    const cudaError_t error = make_int4_skinny_map(matmul.weight, args.packed);
    if (error != cudaSuccess) return error;
  }
  return launch({kernel, ctas, kSkinnyThreads, target.family->pdl, target.stream, smem_bytes},
                args);
}

cudaError_t launch_strip(const MatmulTarget &target, const void *kernel,
                         const Int4MatmulArgs &matmul, int max_m, const StripPlan &plan) {
  const Int4View &weight = matmul.weight;
  StripArgs args{};
  args.matmul = matmul;
  args.k_tiles = static_cast<int>(weight.cols / kStripK);
  args.cluster = plan.cluster;
  args.cluster_rows = static_cast<int>(ceil_divide(plan.rows(), args.cluster));
  const bool gptq = weight.layout == NF4_INT4_GPTQ;
  const ByteMatrix packed{weight.packed, gptq ? weight.cols / 8 : weight.cols,
                          gptq ? weight.rows * 4 : weight.rows / 2};
  cudaError_t error = make_tensor_map(packed, packed.row_bytes, gptq ? 128 : plan.rows() / 2,
                                      gptq ? kStripK / 8 : kStripK, args.packed);
  if (error != cudaSuccess) return error;
  const int64_t x_bytes = weight.cols * 2;
  error =
      make_tensor_map({matmul.x, matmul.m, x_bytes}, matmul.m == 1 ? x_bytes : matmul.x_stride * 2,
                      kStripK * 2, max_m, args.x);
  if (error != cudaSuccess) return error;
  return launch({kernel, plan.strips * args.cluster, kStripThreads, target.family->pdl,
                 target.stream, strip_smem(plan.warps_n, max_m).bytes, args.cluster},
                args);
}

}  // namespace

int plan_int4_skinny_smem(const SkinnySmem &smem, int64_t tiles, const GpuFacts &gpu,
                          Int4SkinnyArgs &args) {
  const Int4View &weight = args.matmul.weight;
  const int group_tiles =
      even_groups(tiles, int4_skinny_tiles_that_fit(smem, weight.groups, gpu.shared_bytes));
  args.work.group_tiles = group_tiles;
  args.scale_pitch = static_cast<int>(int4_skinny_scale_pitch(group_tiles * kWarpTileN));
  args.smem_scales = smem.partials + group_tiles * smem.tile_partials;
  args.smem_zeros = args.smem_scales + static_cast<int>(weight.groups) * args.scale_pitch * 2;
  return args.smem_scales +
         static_cast<int>(int4_skinny_scale_bytes(group_tiles * kWarpTileN, weight.groups));
}

cudaError_t make_int4_skinny_map(const Int4View &weight, TensorMap &map) {
  if (weight.layout == NF4_INT4_GPTQ)
    return make_tensor_map({weight.packed, weight.cols / 8, weight.rows * 4}, weight.rows * 4,
                           kWarpTileN * 4, kWarpTileK / 8, map);
  return make_tensor_map({weight.packed, weight.rows, weight.cols / 2}, weight.cols / 2,
                         kWarpTileK / 2, kWarpTileN, map);
}

cudaError_t launch_skinny(const MatmulTarget &target, const Int4MatmulArgs &matmul, nf4_dtype dtype,
                          int config) {
  const int max_m = kMatmulConfigs[config].tile_m;
  const nf4_int4_layout layout = matmul.weight.layout;
  const auto &kernels = kernels_of<Int4MatmulKernels>(*target.family).skinny;
  const int of_dtype = dtype - NF4_DTYPE_FP16, of_layout = layout - NF4_INT4_GPTQ,
            index = config - kFirstSkinny;
  if (!takes_strips(layout, max_m, target.gpu.tensor_maps))
    return launch_rows(target, kernels.one[of_dtype][of_layout][index], matmul, max_m);
  const StripPlan plan = plan_strips(layout, matmul.weight.rows, matmul.weight.cols, target.gpu);
  const bool wide = plan.warps_n == wide_strip(layout);
  const void *const kernel = (wide ? kernels.wide : kernels.one)[of_dtype][of_layout][index];
  return launch_strip(target, kernel, matmul, max_m, plan);
}

}  // namespace nf4::cuda
