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
  int x_box_rows;          // of a TMA box of x
  const void *kernels[2];  // fp16, bf16: WgmmaArgs
  const void *lora[2];     // the same for products with an adapter
};

struct WgmmaKernels {
  WgmmaKernel of[kMatmulConfigCount - kFirstWgmma];

  template <class Arch>
  static WgmmaKernels make();
};

// Of integer weights; configurations that they do without have no kernels.
template <nf4_int4_layout Layout>
struct Int4WgmmaKernels : WgmmaKernels {
  template <class Arch>
  static Int4WgmmaKernels make();
};

// Of the gradient, likewise.
struct GradWgmmaKernels : WgmmaKernels {
  template <class Arch>
  static GradWgmmaKernels make();
};

// Loads the kernels for a weight of its kind and layout on the device, which is current and has
// them, and fills in resident_clusters.
cudaError_t load_wgmma_kernels(const Device &device, const Weight &weight, GpuFacts &gpu);
cudaError_t load_wgmma_kernels(const Device &device, const Int4Weight &weight, GpuFacts &gpu);
cudaError_t load_wgmma_kernels(const Device &device, const TransposedWeight &weight, GpuFacts &gpu);

// Kernels may use the shared memory that they need only after this. The device is current.
cudaError_t allow_shared_memory(const WgmmaKernels &kernels);

// Fills in what a kernel of the configuration reads of a weight that is one of a stack, or all of
// it, after args.matmul.weight.
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
