// Signatures of launches. A caller's workspace is not initialized, so a flag in it counts as set
// only if it has a value that belongs to this launch.
#pragma once

#include <atomic>
#include <cstdint>

namespace nf4::cuda {

constexpr int kSignatures = 4;  // values that the flags of a launch may have

// The first value of this launch's flags, which no other launch of the process uses. Uninitialized
// memory holds other values.
inline uint64_t next_signature() {
  constexpr uint64_t kFirst = 0x9e3779b97f4a7c15;
  static std::atomic<uint64_t> next{kFirst};
  return next.fetch_add(kSignatures, std::memory_order_relaxed);
}

}  // namespace nf4::cuda
