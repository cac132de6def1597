// Forces one CPU variant for the length of a scope.
#pragma once

#include "cpu/backend.hpp"

namespace nf4::test {

class ForcedVariant {
 public:
  explicit ForcedVariant(const cpu::Variant &variant) { cpu::force_variant(&variant); }
  ~ForcedVariant() { cpu::force_variant(nullptr); }
  ForcedVariant(const ForcedVariant &) = delete;
  ForcedVariant &operator=(const ForcedVariant &) = delete;
};

// The reference, which is the last of the list.
inline const cpu::Variant &scalar_variant() { return *(cpu::variants().end() - 1); }

}  // namespace nf4::test
