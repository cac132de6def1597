// The families of CUDA kernels that this GPU runs.
#pragma once

#include <vector>

#include "cuda/runtime/device.hpp"
#include "cuda/runtime/families.hpp"
#include "nf4/nf4.h"
#include "support/catch.hpp"

namespace nf4::test {

inline int compute_capability() {
  nf4_device device{};
  device.struct_size = sizeof device;
  REQUIRE(nf4_device_info(0, &device) == NF4_STATUS_OK);
  return device.compute_capability;
}

// The shared memory that the library gives a CTA; a build may leave kernels less than the GPU has.
inline int shared_bytes() {
  cuda::Device device;
  REQUIRE(cuda::cached_device(0, device) == NF4_STATUS_OK);
  return device.shared_bytes;
}
// Tells whether a CTA has what skinny kernels of weights with a codebook take: of x in 16 bits on
// every GPU from Ampere on, of x in fp32 on the data-centre ones.
inline bool fits_skinny(nf4_dtype dtype) {
  return dtype != NF4_DTYPE_FP32 || shared_bytes() >= 160 << 10;
}

inline std::vector<const cuda::GpuFamily *> runnable_families() {
  std::vector<const cuda::GpuFamily *> families;
  for (const cuda::GpuFamily &family : cuda::kGpuFamilies)
    if (family.runs_on(compute_capability())) families.push_back(&family);
  return families;
}

// Forces one family for the length of a scope.
class ForcedFamily {
 public:
  explicit ForcedFamily(const cuda::GpuFamily *family) { cuda::force_family(family); }
  ~ForcedFamily() { cuda::force_family(nullptr); }
  ForcedFamily(const ForcedFamily &) = delete;
  ForcedFamily &operator=(const ForcedFamily &) = delete;
};

}  // namespace nf4::test
