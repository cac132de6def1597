#include "support/random.hpp"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace nf4::test {
namespace {

uint64_t read_number(const char *name, uint64_t unset) {
  const char *text = std::getenv(name);
  if (text == nullptr) return unset;
  char *end = nullptr;
  const uint64_t number = std::strtoull(text, &end, 0);
  if (end == text || *end != '\0')
    throw std::invalid_argument(std::string(name) + " is not a number: " + text);
  return number;
}

}  // namespace

uint64_t run_seed() {
  static const uint64_t seed = read_number("NF4_TEST_SEED", 4);
  return seed;
}

int cases_of(int all) {
  static const uint64_t parts = std::max<uint64_t>(1, read_number("NF4_TEST_PARTS", 1));
  return std::max(1, static_cast<int>(static_cast<uint64_t>(all) / parts));
}

}  // namespace nf4::test
