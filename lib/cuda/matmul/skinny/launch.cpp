#include "cuda/matmul/skinny/launch.hpp"

#include <algorithm>
#include <climits>

#include "core/formats.hpp"
#include "cuda/matmul/kernels.hpp"
#include "cuda/matmul/skinny/partition.hpp"

namespace nf4::cuda {
namespace {

int max_m(int config) { return kMatmulConfigs[config].tile_m; }

int64_t cta_count(int64_t rows, const Device &device) {
  return std::min<int64_t>(rows, device.multiprocessors);
}

// Odd: the scales of 8 rows lie in different banks.
int64_t scale_pitch(int64_t k_tiles) { return k_tiles | 1; }

// Bytes of shared memory: of the scale code, and of a row of warp tiles beside partial sums.
struct ScaleBytes {
  int64_t code;
  int64_t nested;
  int64_t items;
};
ScaleBytes scale_bytes(int64_t cols, bool nested, int elements_log2) {
  const int64_t k_tiles = ceil_divide(cols, kWarpTileK);
  return {nested ? kScaleCodeSize * kScaleCodeCopies * 4 : 0,
          nested ? 4 * ceil_divide(kWarpTileN * cols, int64_t{1} << elements_log2) : 0,
          kWarpTileN * scale_pitch(k_tiles) * (nested ? 4 : 16)};
}

// Rows of warp tiles in a group whose sums and scales fit; 0 if not even one does.
int64_t tiles_that_fit(const SkinnySmem &smem, const ScaleBytes &scales, const Device &device) {
  // One entry of nested_absmax more than the tiles' own, and the alignment.
  constexpr int64_t kSlack = 4 + 16;
  const int64_t bytes = device.shared_bytes - smem.partials - scales.code - kSlack;
  return bytes / (smem.tile_partials + scales.nested + scales.items);
}

// Prefetched into L2 before the kernel's own copies, which wait for its first small loads. More
// delays those loads; where a CTA has much to read it does not help.
int prefetch_bytes(int64_t cta_bytes) {
  constexpr int64_t kLarge = 512 << 10, kPrefetch = 32 << 10;
  return cta_bytes > kLarge ? 0 : static_cast<int>(std::min(cta_bytes, kPrefetch) / 16 * 16);
}

// The size of equal groups, so that none is nearly empty.
int even_groups(int64_t tiles, int64_t most) {
  return static_cast<int>(ceil_divide(tiles, ceil_divide(tiles, std::min(tiles, most))));
}

// Fills in how `ctas` CTAs share the work; returns the bytes of shared memory.
int plan_ctas(const SkinnySmem &smem, int64_t ctas, const Device &device, SkinnyArgs &args) {
  const MatmulArgs &matmul = args.matmul;
  const bool nested = matmul.weight.nested_absmax != nullptr;
  const int64_t k_tiles = ceil_divide(matmul.weight.cols, kWarpTileK);
  args.cta_rows = static_cast<int>(matmul.weight.rows / ctas);
  args.big_ctas = static_cast<int>(matmul.weight.rows % ctas);
  args.prefetch_bytes = prefetch_bytes(args.cta_rows * matmul.weight.cols / 2);
  args.k_tiles = static_cast<int>(k_tiles);
  args.scale_pitch = static_cast<int>(scale_pitch(k_tiles));
  args.k_warps = static_cast<int>(std::min<int64_t>(k_tiles, kSkinnyWarps));
  args.n_warps = kSkinnyWarps / args.k_warps;
  args.item_step = args.n_warps * kWarpTileN * args.scale_pitch;
  args.element_step = args.n_warps * kWarpTileN * static_cast<int>(matmul.weight.cols);
  args.k_tiles_divisor = FastDivisor::of(k_tiles);
  args.k_warps_divisor = FastDivisor::of(args.k_warps);
  args.row_step = kSkinnyThreads / args.k_tiles;
  args.k_tile_step = kSkinnyThreads % args.k_tiles;
  args.whole_items = matmul.weight.blocksize_log2 == 6 && matmul.weight.cols % kWarpTileK == 0 &&
                     is_multiple(matmul.weight.absmax, nested ? 4 : 16);

  const ScaleBytes scales =
      scale_bytes(matmul.weight.cols, nested,
                  matmul.weight.blocksize_log2 + matmul.weight.nested_blocksize_log2);
  const int64_t tiles = ceil_divide(ceil_divide(matmul.weight.rows, ctas), kWarpTileN);
  args.group_tiles = even_groups(tiles, tiles_that_fit(smem, scales, device));
  args.smem_scale_code = smem.partials + args.group_tiles * smem.tile_partials;
  args.smem_nested_absmax = args.smem_scale_code + static_cast<int>(scales.code);
  args.smem_scales = static_cast<int>(
      ceil_divide(args.smem_nested_absmax + args.group_tiles * scales.nested + 4, 16) * 16);
  return args.smem_scales + static_cast<int>(args.group_tiles * scales.items);
}

cudaError_t skinny_args(const MatmulArgs &matmul, nf4_dtype dtype, int config, int64_t ctas,
                        bool tensor_map, const Device &device, SkinnyArgs &args, int &smem_bytes) {
  args.matmul = matmul;
  args.codebook = rounded_codebook(matmul.weight, dtype);
  smem_bytes = plan_ctas(skinny_smem(max_m(config), tensor_map), ctas, device, args);
  if (!tensor_map) return cudaSuccess;
  return make_tensor_map({matmul.weight.packed, matmul.weight.rows, matmul.weight.cols / 2},
                         matmul.weight.cols / 2, kWarpTileK / 2, kWarpTileN, args.packed);
}

}  // namespace

bool skinny_can_run(const GpuFamily &family, const MatmulProblem &problem, int config,
                    const Device &device) {
  if (kernels_of<MatmulKernels>(family).of[0][0][config] == nullptr) return false;
  const Weight &weight = problem.weight;
  // Past a row's end codes and x are 0. Their product is 0 unless a caller's codebook begins with
  // an infinity or a NaN.
  if (weight.codebook != nullptr && weight.cols % kWarpTileK != 0) return false;
  // kScaleK columns share a scale, and a CTA's rows have few enough elements, all of which have 32
  // bits.
  if (problem.m > max_m(config) || weight.cols == 0 || weight.cols % kScaleK != 0) return false;
  if (weight.cols > kSkinnyElementsMax / kWarpTileN || weight.rows > UINT32_MAX / weight.cols)
    return false;
  if (weight.blocksize() < kScaleK || !is_multiple(weight.packed, 16)) return false;
  if (!has_x_vectors(problem)) return false;
  const int64_t rows = ceil_divide(weight.rows, cta_count(weight.rows, device)) + kWarpTileN;
  // Elements of a nested block have 31 bits.
  const int log2 = weight.nested() ? weight.blocksize_log2 + weight.nested_blocksize_log2 : 0;
  if (log2 > 30) return false;
  return rows <= kSkinnyElementsMax / weight.cols &&
         tiles_that_fit(skinny_smem(max_m(config), family.tensor_maps),
                        scale_bytes(weight.cols, weight.nested(), log2), device) > 0;
}

int choose_skinny(const GpuFamily &family, const MatmulProblem &problem, const Device &device) {
  // skinny_2 takes less time for a warp tile, skinny_8 starts and ends sooner: 6.1 us instead of
  // 5.3 with 31 rows of 4096 columns a CTA, 11.5 instead of 12.2 with 109.
  constexpr int64_t kManyRows = 64;
  const bool many = problem.weight.rows >= kManyRows * device.multiprocessors;
  for (const int config : {kSkinny2, kSkinny8, kSkinny16})
    if ((config != kSkinny2 || many) && skinny_can_run(family, problem, config, device))
      return config;
  // Its partial sums are the smallest, where rows are very long.
  return skinny_can_run(family, problem, kSkinny2, device) ? kSkinny2 : kMma64x64;
}

cudaError_t launch_skinny(const GpuFamily &family, const void *kernel, const MatmulArgs &matmul,
                          nf4_dtype dtype, int config, const Device &device, cudaStream_t stream) {
  SkinnyArgs args{};
  const int64_t ctas = cta_count(matmul.weight.rows, device);
  int smem_bytes = 0;
  const cudaError_t error =
      skinny_args(matmul, dtype, config, ctas, family.tensor_maps, device, args, smem_bytes);
  if (error != cudaSuccess) return error;
  return launch({kernel, ctas, kSkinnyThreads, family.pdl, stream, smem_bytes}, args);
}

bool joins_launch(const SkinnyBatchProblems &problems, const MatmulProblem &problem,
                  const Device &device) {
  if (problems.count == kSkinnyBatchMax || device.multiprocessors <= kSkinnyBatchMax) return false;
  int64_t elements = problem.weight.elements;
  for (int i = 0; i < problems.count; ++i) elements += problems.list[i]->weight.elements;
  // Half of what a CTA may have, since no share is exactly the mean.
  return elements <= (device.multiprocessors - kSkinnyBatchMax) * (kSkinnyElementsMax / 2);
}

cudaError_t launch_skinny_batch(const GpuFamily &family, const void *kernel,
                                const MatmulArgs *matmuls, int count, nf4_dtype dtype, int config,
                                const Device &device, cudaStream_t stream) {
  SkinnyBatch batch{};
  int64_t ctas[kSkinnyBatchMax], first_cta = 0;
  int smem_bytes = 0;
  WeightSize sizes[kSkinnyBatchMax];
  for (int i = 0; i < count; ++i) sizes[i] = {matmuls[i].weight.rows, matmuls[i].weight.cols};
  partition_ctas(sizes, count, device.multiprocessors, ctas);
  for (int i = 0; i < count; ++i) {
    int own_bytes = 0;
    const cudaError_t error = skinny_args(matmuls[i], dtype, config, ctas[i], family.tensor_maps,
                                          device, batch.problems[i], own_bytes);
    if (error != cudaSuccess) return error;
    smem_bytes = std::max(smem_bytes, own_bytes);
    batch.first_cta[i] = static_cast<int>(first_cta);
    first_cta += ctas[i];
  }
  std::fill(batch.first_cta + count, batch.first_cta + kSkinnyBatchMax, INT_MAX);
  return launch({kernel, first_cta, kSkinnyThreads, family.pdl, stream, smem_bytes}, batch);
}

}  // namespace nf4::cuda
