// A small last-level cache for the length of a scope: some processors have one of 300 MB, and what
// is larger takes minutes.
#pragma once

#include "cpu/cache.hpp"

namespace nf4::test {

class SmallCache {
 public:
  // Outputs of more than two caches have 4M elements at least, which several threads share.
  static constexpr int64_t kBytes = int64_t{8} << 20;

  SmallCache() { cpu::force_last_level_cache_bytes(kBytes); }
  ~SmallCache() { cpu::force_last_level_cache_bytes(0); }
  SmallCache(const SmallCache &) = delete;
  SmallCache &operator=(const SmallCache &) = delete;
};

}  // namespace nf4::test
