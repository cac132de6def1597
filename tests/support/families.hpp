// The families of CUDA kernels that this GPU runs.
#pragma once

#include <vector>

#include "nf4/nf4.h"
#include "support/catch.hpp"

namespace nf4::test {

inline int compute_capability() {
  nf4_device device{};
  device.struct_size = sizeof device;
  REQUIRE(nf4_device_info(0, &device) == NF4_STATUS_OK);
  return device.compute_capability;
}

// Those of a list, which ends in NULL, that this GPU runs.
template <class Family>
std::vector<const Family *> runnable(const Family *const *family) {
  std::vector<const Family *> families;
  for (; *family != nullptr; ++family)
    if ((*family)->family.runs_on(compute_capability())) families.push_back(*family);
  return families;
}

}  // namespace nf4::test
