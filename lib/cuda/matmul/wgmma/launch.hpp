// Launches of the wgmma kernels, which are Hopper's.
#pragma once

#include "cuda/matmul/args.hpp"
#include "cuda/matmul/configs.hpp"
#include "cuda/matmul/target.hpp"
#include "cuda/matmul/wgmma/args.hpp"
#include "cuda/weight/transposed.hpp"
#include "problem.hpp"

namespace nf4::cuda {

struct WgmmaKernel {
  int threads;
  int smem_bytes;
  int x_box_rows;          // rows of a TMA box of x
  const void *kernels[2];  // fp16, bf16; args: WgmmaArgs or Int4WgmmaArgs
  const void *lora[2];     // the same for products with an adapter
};

// A row for each wgmma configuration; rows without kernels are empty.
struct WgmmaKernels {
  WgmmaKernel rows[kFirstMultistage - kFirstWgmma];

  const WgmmaKernel &operator[](int config) const { return rows[config - kFirstWgmma]; }
};

// A table for each kind of weight, and for each layout of integers.
enum class WgmmaTable : uint8_t { kCodebook, kTransposed, kGptq, kAwq, kCompressedTensors, kE2m1 };
constexpr int kWgmmaTableCount = 6;

constexpr WgmmaTable table_of(const Weight &weight) {
  return weight.has_scale_bytes() ? WgmmaTable::kE2m1 : WgmmaTable::kCodebook;
}
constexpr WgmmaTable table_of(const TransposedWeight &) { return WgmmaTable::kTransposed; }
constexpr WgmmaTable table_of(const Int4Weight &weight) {
  return weight.layout == NF4_INT4_GPTQ  ? WgmmaTable::kGptq
         : weight.layout == NF4_INT4_AWQ ? WgmmaTable::kAwq
                                         : WgmmaTable::kCompressedTensors;
}

// The args of kernels of experts are GroupedWgmmaArgsOf the others'.
template <WgmmaTable Table, bool Experts>
struct WgmmaKernelsOf : WgmmaKernels {
  template <class Arch>
  static WgmmaKernelsOf make();
};

// Returns a table's kernels for the GPU, or NULL where it has none.
const WgmmaKernels *find_wgmma_kernels(int compute_capability, WgmmaTable table, bool experts);

// Loads the kernels of a table on the device, which is current and has them.
cudaError_t load_wgmma_kernels(const Device &device, WgmmaTable table, bool experts);

// Fills in gpu.resident_clusters, once the kernels of one weight are loaded.
void read_resident_clusters(const Device &device, GpuFacts &gpu);

// ---- What a kind of weight answers (lib/cuda/kinds) ----------------------------------------

// Returns what a kernel decodes the codes by.
LutCodebook decode_args(const Weight &weight, nf4_dtype dtype, const MatmulConfig &config);
LutCodebook decode_args(const TransposedWeight &weight, nf4_dtype dtype,
                        const MatmulConfig &config);
Int4DecodeArgs decode_args(const Int4Weight &weight, nf4_dtype dtype, const MatmulConfig &config);

// Whether the producer may load the scales of several K-steps at once.
bool has_scale_vectors(const Weight &weight);
bool has_scale_vectors(const TransposedWeight &weight);
bool has_scale_vectors(const Int4Weight &weight);

// The packed weight, in boxes of a K-tile.
cudaError_t make_weight_map(const Weight &weight, int tile_n, TensorMap &map);
cudaError_t make_weight_map(const TransposedWeight &weight, int tile_n, TensorMap &map);
cudaError_t make_weight_map(const Int4Weight &weight, int tile_n, TensorMap &map);

// ---- Launches ------------------------------------------------------------------------------

// Fills in what a kernel of the configuration reads of the weight, which is `stack` or one expert
// of it, besides args.matmul.weight.
template <class W, class Args>
cudaError_t set_weight(const W &weight, const W &stack, nf4_dtype dtype, const MatmulConfig &config,
                       Args &args);

// The kernels are loaded.
cudaError_t launch_wgmma(const MatmulTarget &target, const MatmulProblem &problem,
                         const MatmulArgs &matmul, const MatmulChoice &choice);
cudaError_t launch_wgmma(const MatmulTarget &target, const Int4MatmulProblem &problem,
                         const Int4MatmulArgs &matmul, const MatmulChoice &choice);
cudaError_t launch_wgmma(const MatmulTarget &target, const GradProblem &problem,
                         const MatmulArgs &matmul, const MatmulChoice &choice);

}  // namespace nf4::cuda
