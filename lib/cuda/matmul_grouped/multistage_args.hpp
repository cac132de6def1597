// The arguments of a grouped multistage kernel.
#pragma once

#include "cuda/matmul/multistage/args.hpp"
#include "cuda/matmul_grouped/args.hpp"

namespace nf4::cuda {

// The weight is the stack of all experts; matmul.m is the number of rows of x. CTAs share no tiles,
// so the schedule has K-tiles alone.
struct GroupedMultistageArgs : MultistageArgs {
  Groups groups;
  int expert_n_tiles;
};

}  // namespace nf4::cuda
