// The gradients of an adapter's matrices as their kernels get them. No device code.
#pragma once

#include <cstdint>

namespace nf4::cuda {

// problem.hpp's LoraGrad, and what vectors may load and store.
struct LoraGradHalf {
  const void *left;   // [m][rank]
  const void *right;  // [m][columns]
  void *out;          // [rank][columns], or of dB [columns][rank]
  int64_t right_stride;
  int64_t columns;
  int64_t out_stride;
  bool left_vectors;  // eight ranks of a row, from a multiple of eight on
  bool out_vectors;   // four neighbours of a row, from a multiple of four on
};

struct LoraGradArgs {
  LoraGradHalf a, b;
  int64_t m;
  int64_t tiles_of_a;  // of columns; those of b follow
  float scale;
  int rank;
  int rank_chunks;   // CTAs of a tile
  bool out_is_fp32;  // else in the dtype of what is read
};

constexpr int kLoraGradThreads = 256;
constexpr int kLoraGradColumns = 64;  // of a tile
// Ranks of a chunk: of lora_grad, the second where a multiprocessor has the shared memory; and of
// lora_grad_any.
constexpr int kLoraGradRanks[] = {16, 64};
constexpr int kLoraGradAnyRanks = 8;

// Shared memory: a pipeline for each warp, then in its place the sums of each, in the order of the
// output. Rows of sums are such that lanes that store at a time meet all banks.
struct LoraGradSmem {
  int stages;  // of a warp
  int stage_bytes;
  int a_row, b_row;  // of the sums, in floats
  int sums_bytes;    // of a warp
  int bytes;
};

constexpr LoraGradSmem lora_grad_smem(int ranks) {
  constexpr int kWarps = kLoraGradThreads / 32, kStages = 3;
  const int stage_bytes = 16 * (kLoraGradColumns + ranks) * 2;
  const int a_row = kLoraGradColumns + 8, b_row = ranks + 4;
  const int a = ranks * a_row * 4, b = kLoraGradColumns * b_row * 4;
  const int sums = a > b ? a : b, pipeline = kStages * stage_bytes;
  return {kStages, stage_bytes, a_row, b_row, sums, kWarps * (pipeline > sums ? pipeline : sums)};
}

}  // namespace nf4::cuda
