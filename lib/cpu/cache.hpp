// Cache sizes that kernels depend on.
#pragma once

#include <cstdint>

namespace nf4::cpu {

// Returns the bytes of the last-level cache that one core can use; a usual size if the processor
// does not tell.
int64_t last_level_cache_bytes();

// For tests: sets the value that every later call returns; 0 restores the processor's. Not thread
// safe.
void force_last_level_cache_bytes(int64_t bytes);

// Dense outputs larger than this many last-level caches are written with nontemporal stores.
constexpr int64_t kCachesOfOutput = 2;

}  // namespace nf4::cpu
