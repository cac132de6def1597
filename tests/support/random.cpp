#include "support/random.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace nf4::test {
namespace {

uint64_t read_seed() {
  const char *text = std::getenv("NF4_TEST_SEED");
  if (text == nullptr) return 4;
  char *end = nullptr;
  const uint64_t seed = std::strtoull(text, &end, 0);
  if (end == text || *end != '\0')
    throw std::invalid_argument(std::string("NF4_TEST_SEED is not a number: ") + text);
  return seed;
}

}  // namespace

uint64_t run_seed() {
  static const uint64_t seed = read_seed();
  return seed;
}

}  // namespace nf4::test
