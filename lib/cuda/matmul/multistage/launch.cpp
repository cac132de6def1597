#include "cuda/matmul/multistage/launch.hpp"

#include <algorithm>

#include "cuda/matmul/launch.hpp"
#include "cuda/matmul/multistage/args.hpp"
#include "cuda/matmul/multistage/kernels.hpp"
#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/matmul/workspace.hpp"
#include "cuda/runtime/families.hpp"
#include "cuda/runtime/launch.hpp"
#include "cuda/runtime/shared_memory.hpp"
#include "cuda/runtime/signature.hpp"

namespace nf4::cuda {
namespace {

constexpr int kMaxRasterGroup = 8;

cudaError_t allow_multistage(const GpuFamily &family, const Device &device) {
  return allow_shared_memory<&MultistageKernels::of>(family, device);
}

// Fills in the schedule, and returns the number of CTAs: at most one for each multiprocessor. All
// of them share the tiles of the last wave, and of the one before it if there is one, where the
// workspace has room for their sums.
int64_t plan_tiles(const MatmulSize &size, const MatmulConfig &config, int multiprocessors,
                   int64_t most_sharing, TileSchedule &schedule) {
  const int64_t n_tiles = ceil_divide(size.rows, config.tile_n);
  const int64_t m_tiles = ceil_divide(size.m, config.tile_m);
  const int64_t k_tiles = size.cols / kMultistageTileK, tiles = n_tiles * m_tiles;
  schedule.n_tiles = static_cast<int>(n_tiles);
  schedule.m_tiles = static_cast<int>(m_tiles);
  schedule.tiles = static_cast<int>(tiles);
  schedule.k_tiles = static_cast<int>(k_tiles);
  schedule.raster_group = static_cast<int>(std::min<int64_t>(m_tiles, kMaxRasterGroup));
  const int64_t whole = std::min<int64_t>(tiles, multiprocessors);
  const int64_t sharing =
      std::min({int64_t{multiprocessors}, most_sharing, tiles * k_tiles / kMultistageMinKTiles});
  if (tiles % whole == 0 && whole == multiprocessors) return whole;
  if (sharing <= whole && sharing < multiprocessors) return whole;
  const int64_t shared = std::min(tiles, sharing + tiles % sharing);
  schedule.shared_tiles = static_cast<int>(shared);
  schedule.cta_k_tiles = static_cast<int>(shared * k_tiles / sharing);
  schedule.big_ctas = static_cast<int>(shared * k_tiles % sharing);
  return sharing;
}

// The scales of two K-tiles, the first of them even, lie side by side and are aligned.
bool has_scale_pairs(const Weight &weight) {
  return weight.blocksize_log2 == 6 && weight.cols % (2 * kMultistageTileK) == 0 &&
         is_multiple(weight.absmax, weight.nested() ? 2 : 8) &&
         (!weight.nested() || weight.nested_blocksize_log2 >= 1);
}

}  // namespace

cudaError_t load_multistage_kernels(const GpuFamily &family, const Device &device) {
  const cudaError_t error = load_kernels(kernels_of<MultistageKernels>(family));
  return error == cudaSuccess ? allow_multistage(family, device) : error;
}

cudaError_t launch_multistage(const MatmulTarget &target, const MatmulProblem &problem,
                              const MatmulArgs &matmul, const LutCodebook &codebook, int config) {
  if (const cudaError_t error = allow_multistage(*target.family, target.device)) return error;
  const MatmulConfig &tile = kMatmulConfigs[config];
  const MatmulWorkspace workspace(problem);
  MultistageArgs args{};
  args.matmul = matmul;
  args.decode = codebook;
  const int64_t ctas =
      plan_tiles(size_of(problem), tile, target.gpu.multiprocessors,
                 std::min(workspace.ctas, workspace.sums_bytes / (tile.tile_m * tile.tile_n * 4)),
                 args.schedule);
  args.flags = static_cast<uint64_t *>(problem.workspace);
  args.signature = next_signature();
  args.partials = reinterpret_cast<float *>(static_cast<uint8_t *>(problem.workspace) +
                                            workspace.flags_bytes());
  args.scale_pairs = has_scale_pairs(problem.weight);
  args.y_vectors = is_multiple(matmul.y, 8) && (matmul.m == 1 || matmul.y_stride % 4 == 0);
  const auto &kernels = kernels_of<MultistageKernels>(*target.family).of;
  return launch(
      {kernels[problem.dtype - NF4_DTYPE_FP16][config - kFirstMultistage], ctas, kMultistageThreads,
       target.family->pdl, target.stream, multistage_smem_bytes(tile.tile_m)},
      args);
}

}  // namespace nf4::cuda
