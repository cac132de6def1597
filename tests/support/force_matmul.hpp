// Forces one family and configuration of CUDA kernels, for matmul and its gradient, for the length
// of a scope.
#pragma once

#include <optional>

#include "cuda/matmul/matmul.hpp"

namespace nf4::test {

class ForcedMatmul {
 public:
  ForcedMatmul(const cuda::GpuFamily *family, int config) {
    cuda::force_family(family);
    cuda::force_matmul(config);
    cuda::force_matmul_grad(config);
  }
  ~ForcedMatmul() {
    cuda::force_matmul(std::nullopt);
    cuda::force_matmul_grad(std::nullopt);
    cuda::force_family(nullptr);
  }
  ForcedMatmul(const ForcedMatmul &) = delete;
  ForcedMatmul &operator=(const ForcedMatmul &) = delete;
};

}  // namespace nf4::test
