#include "cuda/costs/built_in.hpp"

#include "cuda/costs/text.hpp"

namespace nf4::cuda {
namespace {

constexpr char kText[] = NF4_COSTS_FIRST_LINE
    "\n"
#include "cuda/costs/built_in/all.inc"
    "end\n";
constexpr char kEmpty[] = NF4_COSTS_FIRST_LINE "\nend\n";

}  // namespace

std::string_view built_in_text() { return {kText, sizeof kText - 1}; }

bool have_built_in_costs() { return sizeof kText > sizeof kEmpty; }

const CostTable &built_in_costs() {
  static CostTable table;
  // A test checks that the text is accepted.
  static const nf4_status parsed = parse_costs(kText, sizeof kText - 1, table);
  static_cast<void>(parsed);
  return table;
}

}  // namespace nf4::cuda
