// Chooses the dequantize kernel and its options.
#pragma once

#include <optional>

#include "cuda/dequant/args.hpp"
#include "cuda/dequant/configs.hpp"
#include "cuda/runtime/device.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// A configuration that a test forces is used as far as the alignment allows.
DequantConfig choose_dequant(const DequantProblem &problem);
DequantArgs dequant_args(const DequantProblem &problem);

// For tests: sets the configuration of every later launch; an empty value restores the library's
// choice. Not thread safe.
void force_dequant(std::optional<DequantConfig> config);

}  // namespace nf4::cuda
