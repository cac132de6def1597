// Where the launches of a matmul go.
#pragma once

#include "cuda/matmul/choose.hpp"
#include "cuda/runtime/target.hpp"

namespace nf4::cuda {

struct MatmulTarget : LaunchTarget {
  GpuFacts gpu;
};

}  // namespace nf4::cuda
