// One family and shape of CUDA matmul kernels for the length of a scope.
#pragma once

#include <optional>

#include "cuda/matmul/select.hpp"

namespace nf4::test {

class ForcedMatmul {
 public:
  ForcedMatmul(const cuda::MatmulFamily *family, cuda::MatmulShape shape) {
    cuda::force_matmul(family, shape);
  }
  ~ForcedMatmul() { cuda::force_matmul(nullptr, std::nullopt); }
  ForcedMatmul(const ForcedMatmul &) = delete;
  ForcedMatmul &operator=(const ForcedMatmul &) = delete;
};

}  // namespace nf4::test
