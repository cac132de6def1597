// The target of a product's launches: a LaunchTarget (runtime/target.hpp), and the facts of its GPU
// on which the choice of a kernel depends.
#pragma once

#include "cuda/matmul/choose.hpp"
#include "cuda/runtime/target.hpp"

namespace nf4::cuda {

struct MatmulTarget : LaunchTarget {
  GpuFacts gpu;
};

GpuFacts facts_of(const LaunchTarget &target);

// Fills in the target of a device, by its number.
nf4_status find_matmul_device(int index, MatmulTarget &target);

}  // namespace nf4::cuda
