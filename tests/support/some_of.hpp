// A part of a test's cases that are not random.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <vector>

#include "support/random.hpp"

namespace nf4::test {

// Returns as many of them as cases_of says; the next n get others.
template <class T>
std::vector<T> some_of(std::initializer_list<T> all, size_t n) {
  std::vector<T> some;
  for (int i = 0; i < cases_of(static_cast<int>(all.size())); ++i)
    some.push_back(all.begin()[(n + static_cast<size_t>(i)) % all.size()]);
  return some;
}

// Returns one of them; the next n get others. Classes and shapes that no code depends on together
// are each tested, without their product.
template <class T>
const T &one_of(std::initializer_list<T> all, size_t n) {
  return all.begin()[n % all.size()];
}

}  // namespace nf4::test
