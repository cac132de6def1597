// The matmul kernels for many rows of x on Hopper: what they take, and which is the fastest.
#pragma once

#include "cuda/matmul/args.hpp"
#include "cuda/runtime/device.hpp"
#include "problem.hpp"

namespace nf4::cuda {

constexpr bool is_wide(MatmulShape shape) { return shape >= kWide16Tall; }

// How a tile's columns and the tiles are shared among thread blocks.
struct WideShape {
  int columns;  // of a tile: rows of x
  int rows;     // of a tile: of the weight
  int threads;  // of a block
  int shared_bytes;
  double slab_cycles;      // what 128 columns of a tile take, estimated
  int boxes;               // in which x comes
  bool streamed;           // all blocks share some of the tiles
  bool scaled_sums;        // and so entries in x's dtype, a caller's too in bf16
  const void *kernels[2];  // fp16, bf16: WideArgs
};

// kWide16Tall and those after it. Only in a build with kernels of sm_90a.
extern const WideShape kWideShapes[kMatmulShapes - kWide16Tall];

// Can the wide kernel of this shape do the problem on the device?
bool wide_takes(const MatmulProblem &problem, MatmulShape shape, const Device &device);

// The shape that takes the least time, of those that can do the problem. `best` stays if there is
// none, or if it is kFew16 and that takes less. The device is current.
cudaError_t best_wide(const MatmulProblem &problem, const Device &device, MatmulShape &best);

cudaError_t launch_wide(const MatmulProblem &problem, const MatmulArgs &args, MatmulShape shape,
                        const Device &device, cudaStream_t stream);

// For a device of compute capability 9.0, which is current; nothing for others.
cudaError_t load_wide_kernels(const Device &device);

}  // namespace nf4::cuda
