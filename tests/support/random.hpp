// Random numbers from which a failing test can be repeated.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>

namespace nf4::test {

// The seed of this run: NF4_TEST_SEED if set, otherwise a fixed number. A test derives the seed of
// each of its cases from it, so that a case does not depend on earlier ones.
uint64_t run_seed();

// The number of a test's random cases to try, at least one. NF4_TEST_PARTS divides `all`, for
// emulated processors.
int cases_of(int all);

class Rng {
 public:
  // Stream number `stream` of the run.
  explicit Rng(uint64_t stream) : engine_(run_seed() * 0x9e3779b97f4a7c15u + stream) {}

  uint64_t bits() { return engine_(); }
  // 0 <= result < n
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  // low <= result <= high
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool one_in(int64_t n) { return below(n) == 0; }
  // 0 <= result < 1
  float uniform() { return static_cast<float>(bits() >> 40) * 0x1p-24f; }
  // Roughly normal, with mean 0 and variance 1: the sum of four uniform 16-bit numbers.
  float normal() {
    const uint64_t b = bits();
    const auto sum =
        static_cast<int64_t>((b & 0xffff) + (b >> 16 & 0xffff) + (b >> 32 & 0xffff) + (b >> 48));
    return static_cast<float>(sum - 131070) * (1.7320508f / 65536);
  }
  float any_float() {
    const auto b = static_cast<uint32_t>(bits());
    float x;
    std::memcpy(&x, &b, sizeof x);
    return x;
  }
  template <class T, size_t n>
  T pick(const T (&choices)[n]) {
    return choices[below(static_cast<int64_t>(n))];
  }
  void fill(void *data, size_t bytes) {
    auto *out = static_cast<unsigned char *>(data);
    for (size_t i = 0; i < bytes; i += 8) {
      const uint64_t b = bits();
      std::memcpy(out + i, &b, bytes - i < 8 ? bytes - i : 8);
    }
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace nf4::test
