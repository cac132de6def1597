// A format's own codebook, in the form from which the wgmma kernels build their LUT.
#pragma once

#include "core/formats.hpp"

namespace nf4::cuda {

struct LutCodebook {
  float exact[kCodebookSize];  // for the range of scales that fp16 holds (W^T)
  RoundedCodebook
      rounded;         // in x's dtype; where scales multiply weights, fp16_with_one or around_one
  float scale_factor;  // for each scale, before it multiplies weights or sums
};

}  // namespace nf4::cuda
