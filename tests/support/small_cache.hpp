// A small last-level cache for the length of a scope. Some processors have a cache of 300 MB, and
// outputs larger than that take minutes.
#pragma once

#include "cpu/cache.hpp"

namespace nf4::test {

class SmallCache {
 public:
  // Outputs of more than two caches have at least 4M elements, which several threads share.
  static constexpr int64_t kBytes = int64_t{8} << 20;

  SmallCache() { cpu::force_last_level_cache_bytes(kBytes); }
  ~SmallCache() { cpu::force_last_level_cache_bytes(0); }
  SmallCache(const SmallCache &) = delete;
  SmallCache &operator=(const SmallCache &) = delete;
};

}  // namespace nf4::test
