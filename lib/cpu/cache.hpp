// The processor's caches, as far as kernels depend on them.
#pragma once

#include <cstdint>

namespace nf4::cpu {

// Bytes of the last-level cache that one core sees; where the processor does not tell, a
// usual size.
int64_t last_level_cache_bytes();

// Dense outputs of more than so many last-level caches are stored past them.
constexpr int64_t kCachesOfOutput = 2;

}  // namespace nf4::cpu
