// One family and shape of CUDA matmul kernels for the length of a scope.
#pragma once

#include <vector>

#include "cuda/matmul/select.hpp"
#include "support/catch.hpp"

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

// The families that have kernels for this GPU.
inline std::vector<const cuda::MatmulFamily *> runnable_families() {
  nf4_device device{};
  device.struct_size = sizeof device;
  REQUIRE(nf4_device_info(0, &device) == NF4_STATUS_OK);
  std::vector<const cuda::MatmulFamily *> families;
  for (auto family = cuda::matmul_families(); *family != nullptr; ++family)
    if ((*family)->family.runs_on(device.compute_capability)) families.push_back(*family);
  return families;
}

}  // namespace nf4::test
