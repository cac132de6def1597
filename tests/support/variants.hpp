// The CPU variants that this machine can run, best first.
#pragma once

#include <vector>

#include "cpu/backend.hpp"

namespace nf4::test {

inline std::vector<const cpu::Variant *> supported_variants() {
  std::vector<const cpu::Variant *> variants;
  for (const cpu::Variant &variant : cpu::variants())
    if (variant.supported()) variants.push_back(&variant);
  return variants;
}

}  // namespace nf4::test
