#include "cuda/matmul/workspace.hpp"

#include <algorithm>

#include "cuda/backend.hpp"
#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/matmul/wgmma/tile.hpp"

namespace nf4::cuda {
namespace {

// The narrowest stream-K tile that holds m rows of x, else the widest.
constexpr const MatmulConfig &stream_k_config(WeightKind kind, int64_t m) {
  int best = -1;
  for (int i = kFirstStreamK; i < kFirstMultistage; ++i) {
    if (!has_kernel(kind, i)) continue;
    const int64_t tile_m = kMatmulConfigs[i].tile_m;
    const int64_t best_m = best < 0 ? 0 : int64_t{kMatmulConfigs[best].tile_m};
    const bool holds = tile_m >= m;
    if (best < 0 || (holds != (best_m >= m) ? holds : holds == (tile_m < best_m))) best = i;
  }
  return kMatmulConfigs[best];
}

// Returns the rows of x up to which a narrower tile than any of stream-K holds them, or a skinny
// kernel is faster; gradients count no skinny kernel.
constexpr int no_stream_k_up_to(WeightKind kind) {
  int m = kind == WeightKind::kTransposed ? 0 : kMatmulConfigs[kSkinny8].tile_m;
  for (int i = kFirstWgmma; i < kFirstStreamK; ++i) {
    const int tile_m = kMatmulConfigs[i].tile_m;
    if (has_kernel(kind, i) && tile_m > m && tile_m < stream_k_config(kind, 1).tile_m) m = tile_m;
  }
  return m;
}

// A table by kind, since every launch asks for it many times.
constexpr int kNoStreamKUpTo[] = {
    no_stream_k_up_to(WeightKind::kCodebook), no_stream_k_up_to(WeightKind::kInt4),
    no_stream_k_up_to(WeightKind::kTransposed), no_stream_k_up_to(WeightKind::kE2m1)};
static_assert(static_cast<int>(WeightKind::kCodebook) == 0 &&
              static_cast<int>(WeightKind::kInt4) == 1 &&
              static_cast<int>(WeightKind::kTransposed) == 2 &&
              static_cast<int>(WeightKind::kE2m1) == 3);
static_assert(kNoStreamKUpTo[0] == 8 && kNoStreamKUpTo[1] == 8 && kNoStreamKUpTo[2] == 0 &&
              kNoStreamKUpTo[3] == 8);

constexpr int sums_of(const MatmulConfig &config) { return config.tile_m * config.tile_n; }

constexpr bool stream_k_in_order() {
  for (int i = 0; i < kFirstMultistage; ++i) {
    if (is_stream_k(i) != (i >= kFirstStreamK)) return false;
    for (int j = kFirstStreamK; j < kFirstMultistage; ++j) {
      const MatmulConfig &a = kMatmulConfigs[i], &b = kMatmulConfigs[j];
      if (is_stream_k(i) && a.tile_m < b.tile_m && sums_of(a) > sums_of(b)) return false;
    }
  }
  return true;
}
static_assert(stream_k_in_order(), "sizes must not decrease as m increases");

// Returns the sums of the largest stream-K tile that the workspace has room for; 0 if there is
// none.
int most_sums(const MatmulSize &size) {
  if (size.m <= kNoStreamKUpTo[static_cast<int>(size.kind)] || size.rows == 0 ||
      size.dtype == NF4_DTYPE_FP32 || size.cols % kStepK != 0 || size.scale_columns < kStepK)
    return 0;
  return sums_of(stream_k_config(size.kind, size.m));
}

}  // namespace

bool workspace_holds(const MatmulSize &size, int config) {
  return has_kernel(size.kind, config) && sums_of(kMatmulConfigs[config]) <= most_sums(size);
}

// In a configuration no more CTAs exchange sums than have kMinKTiles each (choose.cpp).
MatmulWorkspace::MatmulWorkspace(const MatmulSize &size) {
  const int most = most_sums(size);
  if (most == 0) return;
  for (int i = kFirstStreamK; i < kFirstMultistage; ++i)
    if (has_kernel(size.kind, i) && sums_of(kMatmulConfigs[i]) <= most)
      add(size, i, kTileK, kMaxCtas, kMinKTiles);
  if (has_kernel(size.kind, kFirstMultistage))
    add(size, multistage_config(size.m), kMultistageTileK, kMaxMultistageCtas,
        kMultistageMinKTiles);
}

void MatmulWorkspace::add(const MatmulSize &size, int config, int64_t tile_k, int64_t max_ctas,
                          int64_t min_k_tiles) {
  const MatmulConfig &tile = kMatmulConfigs[config];
  // At most as many as fill all CTAs, so that products of them are no large numbers.
  const auto count = [&](int64_t elements, int64_t per_tile) {
    return std::min(ceil_divide(elements, per_tile), max_ctas * min_k_tiles);
  };
  const int64_t k_tiles =
      count(size.rows, tile.tile_n) * count(size.m, tile.tile_m) * count(size.cols, tile_k);
  const int64_t config_ctas = std::min(max_ctas, k_tiles / min_k_tiles);
  ctas = std::max(ctas, config_ctas);
  sums_bytes = std::max(sums_bytes, config_ctas * sums_of(tile) * 4);
}

int64_t lora_workspace_bytes(const MatmulProblem &problem) {
  return LoraWorkspace(problem).bytes();
}

// A weight without elements needs none, and has no lora (validate_matmul.cpp); its rows, cols or m
// may be near the limit of int64.
int64_t matmul_workspace_bytes(const MatmulProblem &problem) {
  if (problem.weight.elements == 0) return 0;
  return MatmulWorkspace(problem).bytes() + lora_workspace_bytes(problem);
}

int64_t permuted_x_bytes(const Int4MatmulProblem &problem) {
  if (problem.weight.permutation == nullptr || problem.empty() || problem.dtype == NF4_DTYPE_FP32)
    return 0;
  return ceil_divide(problem.m * problem.weight.cols * 2, 16) * 16;
}

int64_t matmul_workspace_bytes(const Int4MatmulProblem &problem) {
  if (problem.weight.elements == 0) return 0;
  return MatmulWorkspace(problem).bytes() + permuted_x_bytes(problem);
}

namespace {

template <class W>
int64_t most_bytes(const MatmulBatchOf<W> &batch) {
  int64_t most = 0;
  for (const auto &problem : batch) most = std::max(most, matmul_workspace_bytes(problem));
  return most;
}

}  // namespace

int64_t matmul_workspace_bytes(const MatmulBatch &batch) { return most_bytes(batch); }
int64_t matmul_workspace_bytes(const Int4MatmulBatch &batch) { return most_bytes(batch); }

}  // namespace nf4::cuda
