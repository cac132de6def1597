// Which dequantize kernel runs, and with what.
#pragma once

#include <optional>

#include "cuda/dequant/args.hpp"
#include "cuda/dequant/configs.hpp"
#include "cuda/runtime/device.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// The configuration that a test forces counts as far as the alignment allows.
DequantConfig choose_dequant(const DequantProblem &problem);
DequantArgs dequant_args(const DequantProblem &problem);

// For tests: the configuration of every later launch; empty restores the library's choice. Not
// thread safe.
void force_dequant(std::optional<DequantConfig> config);

}  // namespace nf4::cuda
