// The workspace of matmul. Plain C++, compiled without CUDA too: sizes do not depend on the build.
#pragma once

#include <cstdint>

#include "problem.hpp"

namespace nf4::cuda {

// What the stream-K kernels exchange: a flag for each warp of a CTA, then the partial sums
// of each CTA. Which GPU it will be is not known here, so it is large enough for any Hopper.
struct MatmulWorkspace {
  static constexpr int64_t kMaxCtas = 144;
  static constexpr int64_t kFlags = 16;     // of a CTA, of 8 bytes: a warp's each, up to 128 bytes
  static constexpr int64_t kMinKTiles = 4;  // of a CTA

  int64_t ctas = 0;
  int64_t cta_bytes = 0;  // of partial sums

  explicit MatmulWorkspace(const MatmulProblem &problem);
  int64_t flags_bytes() const { return ctas * kFlags * 8; }
  int64_t bytes() const { return flags_bytes() + ctas * cta_bytes; }
};

}  // namespace nf4::cuda
