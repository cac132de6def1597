// Which dequantize kernels run on a device.
#pragma once

#include "cuda/dequant/args.hpp"

namespace nf4::cuda {

// All families of this build, best first; the last is the baseline. Ends in NULL.
const DequantFamily *const *dequant_families();

// The first that runs on the compute capability, or the one that a test forces; NULL if
// there is none.
const DequantFamily *dequant_family_for(int compute_capability);

// For tests: the family that every later launch uses; NULL restores the choice by
// compute capability. Not thread safe.
void force_dequant_family(const DequantFamily *family);

}  // namespace nf4::cuda
