// Reads the cache size by cpuid. sysconf(_SC_LEVEL3_CACHE_SIZE) gives the size of the whole package
// on AMD processors, ten times what a core can use, and /sys may be unreadable.
#include "cpu/cache.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>

namespace nf4::cpu {
namespace {

constexpr int64_t kUsualBytes = int64_t{32} << 20;

#if defined(__x86_64__)
// The leaves "Deterministic cache parameters" of Intel and AMD, which have the same fields.
constexpr unsigned kCacheLeaves[] = {4, 0x8000001d};
constexpr unsigned kMaxCaches = 8;

unsigned bits(unsigned value, int low, int count) { return value >> low & ((1u << count) - 1); }

int64_t largest_cache_bytes(unsigned leaf) {
  int64_t largest = 0;
  for (unsigned cache = 0; cache < kMaxCaches; ++cache) {
    unsigned a, b, c, d;
    const bool told = __get_cpuid_count(leaf, cache, &a, &b, &c, &d);
    if (!told || bits(a, 0, 5) == 0) break;
    const int64_t line_bytes = bits(b, 0, 12) + 1;
    const int64_t partitions = bits(b, 12, 10) + 1;
    const int64_t ways = bits(b, 22, 10) + 1;
    largest = std::max(largest, line_bytes * partitions * ways * (int64_t{c} + 1));
  }
  return largest;
}

int64_t find_bytes() {
  int64_t largest = 0;
  for (const unsigned leaf : kCacheLeaves) largest = std::max(largest, largest_cache_bytes(leaf));
  return largest > 0 ? largest : kUsualBytes;
}
#else
int64_t find_bytes() { return kUsualBytes; }
#endif

int64_t forced_bytes = 0;

}  // namespace

int64_t last_level_cache_bytes() {
  static const int64_t bytes = find_bytes();
  return forced_bytes > 0 ? forced_bytes : bytes;
}

void force_last_level_cache_bytes(int64_t bytes) { forced_bytes = bytes; }

}  // namespace nf4::cpu
