// A format's own codebook as kernels that build a LUT get it.
#pragma once

#include "core/formats.hpp"

namespace nf4::cuda {

struct LutCodebook {
  float exact[kCodebookSize];  // for the range of scales that fp16 holds (W^T)
  RoundedCodebook
      rounded;         // in x's dtype; where scales multiply weights, fp16_with_one or around_one
  float scale_factor;  // of each scale, before it multiplies weights or sums
};

}  // namespace nf4::cuda
