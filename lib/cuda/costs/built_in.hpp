// Costs that are part of the library, for GPUs whose owners sent a report of `nf4 bench`. They
// count on GPUs with any driver. docs/design/tuning.md says how the rows of a GPU are added.
#pragma once

#include <string_view>

#include "cuda/costs/table.hpp"

namespace nf4::cuda {

// The costs as a text, in which the driver of each GPU is 0.
std::string_view built_in_text();

bool have_built_in_costs();

// The table of the text, which the first call parses.
const CostTable &built_in_costs();

}  // namespace nf4::cuda
