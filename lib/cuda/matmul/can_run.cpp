// What the kernels of each kind of weight can run.
#include <algorithm>
#include <limits>

#include "cuda/matmul/args.hpp"
#include "cuda/matmul/choose.hpp"
#include "cuda/matmul/skinny/smem.hpp"
#include "cuda/matmul/skinny/strip_smem.hpp"
#include "cuda/matmul/wgmma/tile.hpp"

namespace nf4::cuda {
namespace {

// What does not depend on the kind of weight.
template <class W>
bool wgmma_sizes_can_run(const MatmulProblemOf<W> &problem, const GpuFacts &gpu, int which) {
  constexpr int64_t kMaxCols = int64_t{1} << 22;   // offsets within 256 rows have 31 bits
  constexpr int64_t kMaxRows = int64_t{1} << 30;   // of x or the weight
  constexpr int64_t kMaxPitch = int64_t{1} << 39;  // elements: a tensor map's bytes
  const W &weight = problem.weight;
  return gpu.wgmma && gpu.shared_bytes >= kWgmmaSmemBytes && weight.cols > 0 &&
         weight.cols <= kMaxCols && weight.rows <= kMaxRows && problem.m <= kMaxRows &&
         is_multiple(weight.packed, 16) && has_x_vectors(problem) &&
         (problem.m == 1 || problem.x_stride < kMaxPitch) &&
         ceil_divide(weight.rows, 128) * ceil_divide(problem.m, 16) <=
             std::numeric_limits<int>::max() / 2 &&
         (!is_stream_k(which) || can_stream_k(size_of(problem), gpu, which));
}

}  // namespace

bool skinny_can_run(const MatmulProblem &problem, const GpuFacts &gpu, int config) {
  if (!gpu.tensor_cores) return false;
  const Weight &weight = problem.weight;
  const int max_m = kMatmulConfigs[config].tile_m;
  // Past a row's end codes and x are 0. Their product is 0 unless a caller's codebook begins with
  // an infinity or a NaN.
  if (weight.codebook != nullptr && weight.cols % kWarpTileK != 0) return false;
  // kScaleK columns share a scale, and a CTA's rows have few enough elements, all of which have 32
  // bits.
  if (problem.m > max_m || weight.cols == 0 || weight.cols % kScaleK != 0) return false;
  if (weight.cols > kSkinnyElementsMax / kWarpTileN || weight.rows > UINT32_MAX / weight.cols)
    return false;
  if (weight.blocksize() < kScaleK || !is_multiple(weight.packed, 16)) return false;
  if (!has_x_vectors(problem)) return false;
  const int64_t ctas =
      std::min(weight.rows, weight_ctas(gpu.multiprocessors, lora_ctas(problem.lora, weight.cols)));
  const int64_t rows = ceil_divide(weight.rows, ctas) + kWarpTileN;
  // Elements of a nested block have 31 bits.
  const int log2 = weight.nested() ? weight.blocksize_log2 + weight.nested_blocksize_log2 : 0;
  if (log2 > 30) return false;
  return rows <= kSkinnyElementsMax / weight.cols &&
         skinny_tiles_that_fit(
             skinny_smem_of(problem.dtype, max_m, gpu.tensor_maps),
             skinny_scale_bytes(weight.cols, weight.nested(), log2),
             gpu.shared_bytes -
                 shared_lora_bytes(problem.m, static_cast<int>(lora_stride(problem.lora)))) > 0;
}

bool wgmma_shape_can_run(const MatmulProblem &problem, const GpuFacts &gpu, int which) {
  if (problem.dtype == NF4_DTYPE_FP32) return false;
  const Weight &weight = problem.weight;
  // Past a row's end codes, scales and x are 0. Their product is 0 unless a caller's codebook
  // begins with an infinity or a NaN.
  const int whole = weight.codebook != nullptr ? kTileK : kStepK;
  // LutScaledBf16 and LutScaledFp16 are for the formats' own codebooks.
  if (weight.codebook != nullptr && kMatmulConfigs[which].scale_on == ScaleOn::kWeights)
    return false;
  return weight.cols % whole == 0 && weight.blocksize() >= kStepK &&
         wgmma_sizes_can_run(problem, gpu, which);
}

// Stored rows of tensor maps are multiples of 16 bytes, and 64 rows of W^T share scales, of which
// all have 31 bits. The codebook is as above.
bool wgmma_shape_can_run(const GradProblem &problem, const GpuFacts &gpu, int which) {
  if (problem.dtype == NF4_DTYPE_FP32) return false;
  const Weight &weight = problem.weight;
  return weight.codebook == nullptr && weight.rows % kStepK == 0 && weight.blocksize() >= kStepK &&
         weight.blocks <= std::numeric_limits<int>::max() - kTileK * weight.rows &&
         wgmma_sizes_can_run(problem, gpu, which);
}

namespace {
// Words of zero points and vectors of scales have 8 rows; rows of tensor maps and of compressed-
// tensors' scales are multiples of 16 bytes.
bool int4_skinny_sizes_can_run(const Int4MatmulProblem &problem, const GpuFacts &gpu, int config) {
  constexpr int64_t kMaxRows = int64_t{1} << 28;  // 32-bit coordinates in tensor maps
  const Int4Weight &weight = problem.weight;
  if (!gpu.tensor_cores || problem.m > kMatmulConfigs[config].tile_m || weight.g_idx != nullptr)
    return false;
  if (weight.cols == 0 || weight.group_size % kScaleK != 0) return false;
  if (weight.cols > kSkinnyElementsMax / kWarpTileN || weight.rows > kMaxRows) return false;
  return is_multiple(weight.packed, 16) && is_multiple(weight.scales, 16) &&
         has_x_vectors(problem) && (weight.layout != NF4_INT4_GPTQ || weight.rows % kInt4Unit == 0);
}
}  // namespace

bool skinny_tiles_can_run(const Int4MatmulProblem &problem, const GpuFacts &gpu, int config) {
  const Int4Weight &weight = problem.weight;
  if (!int4_skinny_sizes_can_run(problem, gpu, config)) return false;
  const int64_t ctas = std::min<int64_t>(ceil_divide(weight.rows, kInt4Unit), gpu.multiprocessors);
  const int64_t rows = ceil_divide(weight.rows, ctas) + kInt4Unit + kWarpTileN;
  return rows <= kSkinnyElementsMax / weight.cols &&
         int4_skinny_tiles_that_fit(int4_skinny_smem(kMatmulConfigs[config].tile_m), weight.groups,
                                    gpu.shared_bytes) > 0;
}

bool skinny_can_run(const Int4MatmulProblem &problem, const GpuFacts &gpu, int config) {
  constexpr int64_t kMaxPitch = int64_t{1} << 39;  // elements: a tensor map's bytes
  const Int4Weight &weight = problem.weight;
  const int max_m = kMatmulConfigs[config].tile_m;
  if (!takes_strips(weight.layout, max_m, gpu.tensor_maps))
    return skinny_tiles_can_run(problem, gpu, config);
  return int4_skinny_sizes_can_run(problem, gpu, config) && gpu.tensor_maps && config != kSkinny2 &&
         (weight.layout == NF4_INT4_GPTQ || weight.rows % 32 == 0) &&
         (problem.m == 1 || problem.x_stride < kMaxPitch) &&
         gpu.shared_bytes >= strip_smem(narrow_strip(weight.layout), max_m).bytes &&
         gpu.shared_bytes >= strip_smem(wide_strip(weight.layout), max_m).bytes;
}

// Rows of the weight's tensor map are multiples of 16 bytes; scales and zeros are loaded for
// several rows at once.
bool wgmma_shape_can_run(const Int4MatmulProblem &problem, const GpuFacts &gpu, int which) {
  const Int4Weight &weight = problem.weight;
  const bool by_rows = weight.layout == NF4_INT4_COMPRESSED_TENSORS;
  const int whole_rows = by_rows ? 1 : weight.layout == NF4_INT4_AWQ ? 32 : 8;
  return weight.cols % kStepK == 0 && weight.rows % whole_rows == 0 && weight.g_idx == nullptr &&
         weight.group_size % kStepK == 0 && (by_rows || is_multiple(weight.scales, 8)) &&
         wgmma_sizes_can_run(problem, gpu, which);
}

}  // namespace nf4::cuda
