// Which dequantize kernels run on a device.
#pragma once

#include "cuda/dequant/args.hpp"
#include "cuda/runtime/device.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// All families of this build, best first; the last is the baseline. Ends in NULL.
const DequantFamily *const *dequant_families();

// The first that runs on the compute capability, or the one that a test forces; NULL if
// there is none.
const DequantFamily *dequant_family_for(int compute_capability);

// What a problem's kernel gets, and which it is. The shape that a test forces counts as far
// as the alignment allows.
DequantArgs dequant_args(const DequantProblem &problem);
DequantShape dequant_shape(const DequantProblem &problem);

// Loads the kernels of a family on the current device.
cudaError_t load_dequant_kernels(const DequantFamily &family);

// For tests: the family and the shape that every later launch uses; NULL restores the library's
// choice. Not thread safe.
void force_dequant(const DequantFamily *family, const DequantShape *shape);

}  // namespace nf4::cuda
