// The floating-point environment that kernels run in.
#pragma once

#include <cfenv>

namespace nf4::cpu {

// Kernels promise bits, so they run in the default environment whatever the caller's is
// (flush-to-zero, say); the caller's comes back with the end of the scope. Threads made
// within it inherit it.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment &) = delete;
  DefaultFloatEnvironment &operator=(const DefaultFloatEnvironment &) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace nf4::cpu
