// Forces one kernel of grouped products for the length of a scope.
#pragma once

#include "cuda/matmul_grouped/matmul_grouped.hpp"

namespace nf4::test {

class ForcedGrouped {
 public:
  ForcedGrouped(const cuda::GpuFamily *family, int config) {
    cuda::force_family(family);
    cuda::force_matmul_grouped(config);
  }
  ~ForcedGrouped() {
    cuda::force_matmul_grouped(std::nullopt);
    cuda::force_family(nullptr);
  }
  ForcedGrouped(const ForcedGrouped &) = delete;
  ForcedGrouped &operator=(const ForcedGrouped &) = delete;
};

}  // namespace nf4::test
