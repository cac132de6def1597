// Launches of the skinny kernels of integer weights.
#include <algorithm>

#include "cuda/matmul/skinny/launch.hpp"
#include "cuda/matmul/skinny/plan_work.hpp"
#include "cuda/matmul/skinny/strip_args.hpp"
#include "cuda/runtime/launch.hpp"

namespace nf4::cuda {
namespace {

// Fills in how `ctas` CTAs share the work; returns the bytes of shared memory.
int plan_ctas(const SkinnySmem &smem, int64_t ctas, const GpuFacts &gpu, Int4SkinnyArgs &args) {
  const Int4View &weight = args.matmul.weight;
  const int64_t units = ceil_divide(weight.rows, kInt4Unit);
  plan_work(units, weight.cols, ctas, args.work);
  const int64_t tiles = ceil_divide(ceil_divide(units, ctas) * kInt4Unit, kWarpTileN);
  const int group_tiles =
      even_groups(tiles, int4_skinny_tiles_that_fit(smem, weight.groups, gpu.shared_bytes));
  args.work.group_tiles = group_tiles;
  args.scale_pitch = static_cast<int>(int4_skinny_scale_pitch(group_tiles * kWarpTileN));
  args.smem_scales = smem.partials + group_tiles * smem.tile_partials;
  args.smem_zeros = args.smem_scales + static_cast<int>(weight.groups) * args.scale_pitch * 2;
  return args.smem_scales +
         static_cast<int>(int4_skinny_scale_bytes(group_tiles * kWarpTileN, weight.groups));
}

// Of compressed-tensors words run along rows of bytes, of GPTQ across them.
cudaError_t make_map(const Int4View &weight, TensorMap &map) {
  if (weight.layout == NF4_INT4_GPTQ)
    return make_tensor_map({weight.packed, weight.cols / 8, weight.rows * 4}, weight.rows * 4,
                           kWarpTileN * 4, kWarpTileK / 8, map);
  return make_tensor_map({weight.packed, weight.rows, weight.cols / 2}, weight.cols / 2,
                         kWarpTileK / 2, kWarpTileN, map);
}

cudaError_t launch_rows(const MatmulTarget &target, const void *kernel,
                        const Int4MatmulArgs &matmul, int max_m) {
  Int4SkinnyArgs args{};
  args.matmul = matmul;
  const int64_t ctas =
      std::min<int64_t>(ceil_divide(matmul.weight.rows, kInt4Unit), target.gpu.multiprocessors);
  const bool tensor_maps = target.gpu.tensor_maps;
  const int smem_bytes = plan_ctas(int4_skinny_smem(max_m), ctas, target.gpu, args);
  if (tensor_maps) {
    const cudaError_t error = make_map(matmul.weight, args.packed);
    if (error != cudaSuccess) return error;
  }
  return launch({kernel, ctas, kSkinnyThreads, target.family->pdl, target.stream, smem_bytes},
                args);
}

// CTAs of a strip's cluster: as many as are resident at a time, with work for each. A cluster's
// multiprocessors are of one group of 16 or 18, not all of which are whole.
int strip_cluster(int64_t strips, int64_t k_tiles, const GpuFacts &gpu) {
  int cluster = 1;
  for (int size = 2; size <= kMaxClusterSize; ++size)
    if (strips <= gpu.multiprocessors / 18 * (16 / size) && size * kStripWarpsK <= k_tiles)
      cluster = size;
  return cluster;
}

cudaError_t launch_strip(const MatmulTarget &target, const void *kernel,
                         const Int4MatmulArgs &matmul, int max_m) {
  const Int4View &weight = matmul.weight;
  StripArgs args{};
  args.matmul = matmul;
  args.k_tiles = static_cast<int>(weight.cols / kStripK);
  const int64_t strips = ceil_divide(weight.rows, kStripN);
  args.cluster = strip_cluster(strips, args.k_tiles, target.gpu);
  args.cluster_rows = static_cast<int>(ceil_divide(kStripN, args.cluster));
  const bool gptq = weight.layout == NF4_INT4_GPTQ;
  const ByteMatrix packed{weight.packed, gptq ? weight.cols / 8 : weight.cols,
                          gptq ? weight.rows * 4 : weight.rows / 2};
  cudaError_t error = make_tensor_map(packed, packed.row_bytes, gptq ? 128 : kStripN / 2,
                                      gptq ? kStripK / 8 : kStripK, args.packed);
  if (error != cudaSuccess) return error;
  const int64_t x_bytes = weight.cols * 2;
  error =
      make_tensor_map({matmul.x, matmul.m, x_bytes}, matmul.m == 1 ? x_bytes : matmul.x_stride * 2,
                      kStripK * 2, max_m, args.x);
  if (error != cudaSuccess) return error;
  return launch({kernel, strips * args.cluster, kStripThreads, target.family->pdl, target.stream,
                 strip_smem(max_m).bytes, args.cluster},
                args);
}

}  // namespace

cudaError_t launch_skinny(const MatmulTarget &target, const void *kernel,
                          const Int4MatmulArgs &matmul, nf4_dtype, int config) {
  const int max_m = kMatmulConfigs[config].tile_m;
  return takes_strips(matmul.weight.layout, max_m, target.gpu.tensor_maps)
             ? launch_strip(target, kernel, matmul, max_m)
             : launch_rows(target, kernel, matmul, max_m);
}

}  // namespace nf4::cuda
