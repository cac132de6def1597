// The compile matrix of an adapter's product with x by TMA.
#pragma once

#include <iterator>

#include "cuda/lora/tma_args.hpp"

namespace nf4::cuda {

// The kernels of a family that has wgmma kernels (runtime/families.hpp). args: LoraTmaArgs.
struct LoraTmaKernels {
  // [dtype - NF4_DTYPE_FP16][A is fp32][gradient][index of kPersistentTileM]
  const void *persistent[2][2][2][std::size(kPersistentTileM)];
  // The same, with an index of kWideRanks.
  const void *wide[2][2][2][std::size(kWideRanks)];

  template <class Arch>
  static LoraTmaKernels make();
};

}  // namespace nf4::cuda
