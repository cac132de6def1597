// Which wgmma kernel a product takes, and its launch.
#pragma once

#include "cuda/matmul/args.hpp"
#include "cuda/matmul/configs.hpp"
#include "cuda/runtime/device.hpp"
#include "problem.hpp"

namespace nf4::cuda {

struct WgmmaKernel {
  int threads;
  int smem_bytes;
  int x_box_rows;          // of a TMA box of x
  const void *kernels[2];  // fp16, bf16: WgmmaArgs
};

struct WgmmaKernels {
  WgmmaKernel of[kMatmulConfigCount - kFirstWgmma];
};
// Only in a build with kernels of sm_90a.
extern const WgmmaKernels kWgmmaKernels;

// Whether the kernel of this configuration can run the problem on the device.
bool wgmma_can_run(const MatmulProblem &problem, int config, const Device &device);

// The configuration of the least estimated time, of those that can run the problem. `config` stays
// if there is none, or if it is kSkinny16 and that takes less. The device is current.
cudaError_t choose_wgmma(const MatmulProblem &problem, const Device &device, int &config);

cudaError_t launch_wgmma(const MatmulProblem &problem, const MatmulArgs &matmul, int config,
                         const Device &device, cudaStream_t stream);

// For a device of compute capability 9.0, which is current; nothing for others.
cudaError_t load_wgmma_kernels(const Device &device);

}  // namespace nf4::cuda
