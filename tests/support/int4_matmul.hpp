// Products of integer weights on a GPU: their cases, and the kernels that exist for them.
#pragma once

#include <cuda_runtime.h>

#include "cuda/matmul/matmul.hpp"
#include "cuda/matmul/wgmma/tile.hpp"
#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/families.hpp"
#include "support/int4_cases.hpp"
#include "support/matmul_cases.hpp"
#include "support/matmul_placed.hpp"

namespace nf4::test {

using PlacedInt4Matmul = PlacedMatmulOf<HostInt4Weight>;

// Scales of about 0.01, and rows of x that vectors can load.
inline Int4MatmulCase plain_int4_case(Rng &rng, const Int4Class &kind, const Int4Shape &shape,
                                      nf4_dtype dtype, int64_t m) {
  Int4MatmulCase test;
  do test = random_int4_matmul_case(rng, kind, shape, dtype, m, XKind::kOrdinary, true);
  while (test.x_stride % 8 != 0);
  return test;
}

// Tells whether the best family has a skinny, wgmma or multistage kernel of the layout in the
// configuration. With less shared memory than Hopper's, some of the first two do not exist.
inline bool has_fast_kernel(nf4_int4_layout layout, int config) {
  const cuda::GpuFamily &best = *runnable_families()[0];
  if (cuda::is_multistage(config)) return best.tensor_cores;
  if (shared_bytes() < cuda::kWgmmaSmemBytes) return false;
  if (cuda::is_skinny(config))
    return best.tensor_maps && (layout != NF4_INT4_AWQ || config != cuda::kSkinny2);
  return cuda::is_wgmma(config) && cuda::has_kernel(cuda::WeightKind::kInt4, config) &&
         cuda::matmul_has(best, cuda::kFirstWgmma, compute_capability());
}

// A product that is aligned in memory, rows and groups does not use kMma64x64 if there are other
// kernels.
inline void require_not_mma(const PlacedInt4Matmul &placed, const Int4MatmulCase &test) {
  if (!test.weight.has(kInt4GIdx) &&
      has_fast_kernel(test.weight.shape.layout, cuda::kFirstMultistage))
    REQUIRE(placed.used(test) != cuda::kMma64x64);
}

}  // namespace nf4::test
