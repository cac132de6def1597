#include "cuda/matmul/workspace.hpp"

#include <algorithm>

#include "cuda/backend.hpp"
#include "cuda/matmul/kernel_sets.hpp"
#include "cuda/matmul/wgmma/tile.hpp"

namespace nf4::cuda {
namespace {

// The narrowest stream-K tile that holds m rows of x, else the widest.
constexpr const MatmulConfig &stream_k_config(WgmmaSet set, int64_t m) {
  int best = -1;
  for (int i = kFirstStreamK; i < kMatmulConfigCount; ++i) {
    if (!has_kernel(set, i)) continue;
    const int64_t tile_m = kMatmulConfigs[i].tile_m;
    const int64_t best_m = best < 0 ? 0 : int64_t{kMatmulConfigs[best].tile_m};
    const bool holds = tile_m >= m;
    if (best < 0 || (holds != (best_m >= m) ? holds : holds == (tile_m < best_m))) best = i;
  }
  return kMatmulConfigs[best];
}

// So many rows of x fit into a narrower tile than any of stream-K, or into a skinny kernel's that
// is faster; gradients have none.
constexpr int64_t no_stream_k_up_to(WgmmaSet set) {
  int64_t m = set == WgmmaSet::kGrad ? 0 : kMatmulConfigs[kSkinny8].tile_m;
  for (int i = kFirstWgmma; i < kFirstStreamK; ++i) {
    const int64_t tile_m = kMatmulConfigs[i].tile_m;
    if (has_kernel(set, i) && tile_m > m && tile_m < stream_k_config(set, 1).tile_m) m = tile_m;
  }
  return m;
}

// What of each set does not depend on m: every launch asks for it, many times.
struct SetFacts {
  const MatmulConfig *narrowest;
  int64_t no_stream_k_up_to;
};
constexpr SetFacts facts_of(WgmmaSet set) {
  return {&stream_k_config(set, 1), no_stream_k_up_to(set)};
}
constexpr SetFacts kFacts[] = {facts_of(WgmmaSet::kCodebook), facts_of(WgmmaSet::kIntegers),
                               facts_of(WgmmaSet::kGrad)};
static_assert(kFacts[0].no_stream_k_up_to == 8 && kFacts[1].no_stream_k_up_to == 8 &&
              kFacts[2].no_stream_k_up_to == 0);

constexpr bool stream_k_in_order() {
  for (int i = 0; i < kMatmulConfigCount; ++i) {
    if (is_stream_k(i) != (i >= kFirstStreamK)) return false;
    for (int j = kFirstStreamK; j < kMatmulConfigCount; ++j) {
      const MatmulConfig &a = kMatmulConfigs[i], &b = kMatmulConfigs[j];
      if (is_stream_k(i) && a.tile_m < b.tile_m && a.tile_m * a.tile_n > b.tile_m * b.tile_n)
        return false;
    }
  }
  return true;
}
static_assert(stream_k_in_order(), "sizes must not decrease as m increases");

}  // namespace

MatmulSize size_of(const MatmulProblem &problem) {
  const Weight &weight = problem.weight;
  return {problem.dtype, problem.m,          weight.rows,
          weight.cols,   weight.blocksize(), WgmmaSet::kCodebook};
}

MatmulSize size_of(const Int4MatmulProblem &problem) {
  const Int4Weight &weight = problem.weight;
  return {problem.dtype,
          problem.m,
          weight.rows,
          weight.cols,
          weight.g_idx == nullptr ? weight.group_size : 1,
          WgmmaSet::kIntegers};
}

// The columns of W^T need not be whole steps, but its rows, which share scales.
MatmulSize size_of(const GradProblem &problem) {
  const Weight &weight = problem.weight;
  return {problem.dtype,
          problem.m,
          weight.rows,
          ceil_divide(weight.cols, kStepK) * kStepK,
          weight.rows % kStepK == 0 ? weight.blocksize() : 1,
          WgmmaSet::kGrad};
}

MatmulWorkspace::MatmulWorkspace(const MatmulSize &size) {
  const SetFacts &facts = kFacts[static_cast<int>(size.set)];
  if (size.m <= facts.no_stream_k_up_to || size.rows == 0 || size.dtype == NF4_DTYPE_FP32 ||
      size.cols % kStepK != 0 || size.scale_columns < kStepK)
    return;
  const MatmulConfig &narrowest = *facts.narrowest;
  // Each at most as many as fill all CTAs, so that their product is no large number.
  const auto count = [](int64_t size, int64_t tile) {
    return std::min(ceil_divide(size, tile), kMaxCtas * kMinKTiles);
  };
  const int64_t k_tiles = count(size.rows, narrowest.tile_n) * count(size.m, narrowest.tile_m) *
                          count(size.cols, kTileK);
  ctas = std::min(kMaxCtas, k_tiles / kMinKTiles);
  const MatmulConfig &config = stream_k_config(size.set, size.m);
  cta_bytes = int64_t{config.tile_m} * config.tile_n * 4;
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
