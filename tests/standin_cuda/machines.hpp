// GPUs of each kind for which there are kernels (CUDA C++ Programming Guide, technical
// specifications per compute capability).
#pragma once

#include <vector>

#include "cuda/runtime/families.hpp"
#include "standin_cuda/standin.hpp"

namespace nf4::test::standin {

constexpr Gpu kT4{75, 40, 64 << 10};
constexpr Gpu kA100{80, 108, 163 << 10};
constexpr Gpu kL4{89, 58, 99 << 10};
constexpr Gpu kH200{90, 132, 227 << 10};
constexpr Gpu kB200{100, 148, 227 << 10};
constexpr Gpu kRtx5090{120, 170, 99 << 10};

// CUDA 12.0, 12.2, 12.8 and 13.0 came with drivers 525, 535, 570 and 580.
constexpr int kDrivers[] = {kOldestDriver, 12020, 12080, kNewestDriver};

// The machines for which this build has kernels.
inline std::vector<Gpu> gpus() {
  std::vector<Gpu> found;
  for (const Gpu &gpu : {kT4, kA100, kL4, kH200, kB200, kRtx5090})
    if (cuda::family_for(gpu.compute_capability) != nullptr) found.push_back(gpu);
  return found;
}

// The one that has most kernels.
inline Gpu best_gpu() {
  return cuda::family_for(kH200.compute_capability) != nullptr ? kH200 : gpus().front();
}

}  // namespace nf4::test::standin
