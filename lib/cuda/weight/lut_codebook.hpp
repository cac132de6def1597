// A format's own codebook as kernels that build a LUT get it.
#pragma once

#include "core/formats.hpp"

namespace nf4::cuda {

struct LutCodebook {
  float exact[kCodebookSize];
  RoundedCodebook rounded;  // in x's dtype; in fp16 of unit 1 where weights are scaled
};

}  // namespace nf4::cuda
