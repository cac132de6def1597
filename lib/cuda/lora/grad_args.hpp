// The arguments of the kernels for the gradients of an adapter's matrices. No device code.
#pragma once

#include <cstdint>

namespace nf4::cuda {

// LoraGrad of problem.hpp, and whether vectors may load and store.
struct LoraGradHalf {
  const void *left;   // [m][rank]
  const void *right;  // [m][columns]
  void *out;          // [rank][columns]; for dB [columns][rank]
  int64_t right_stride;
  int64_t columns;
  int64_t out_stride;
  bool left_vectors;  // eight ranks of a row load as a vector, from a multiple of eight on
  bool out_vectors;   // four neighbours of a row store as a vector, from a multiple of four on
};

struct LoraGradArgs {
  LoraGradHalf a, b;
  int64_t m;
  int64_t tiles_of_a;  // in columns; the tiles of b follow
  float scale;
  int rank;
  int rank_chunks;   // CTAs per tile
  bool out_is_fp32;  // otherwise in the dtype of the inputs
};

constexpr int kLoraGradThreads = 256;
constexpr int kLoraGradColumns = 64;  // per tile
// The ranks of a chunk. lora_grad uses the second number if a multiprocessor has enough shared
// memory; lora_grad_any has its own.
constexpr int kLoraGradRanks[] = {16, 64};
constexpr int kLoraGradAnyRanks = 8;

// Shared memory: a pipeline for each warp; later, in its place, the sums of each warp in the order
// of the output. The stride of sums makes lanes that store together use all banks.
struct LoraGradSmem {
  int stages;  // per warp
  int stage_bytes;
  int a_row, b_row;  // strides of the sums, in floats
  int sums_bytes;    // per warp
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
