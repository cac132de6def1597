// prmt.b32 (PTX ISA, "prmt"), whose selectors may also name the sign of a byte. __byte_perm takes
// only those of whole bytes.
#pragma once

#include <cstdint>

namespace nf4::cuda {

// Byte i of the result is the byte of (second, first) that the low three bits of nibble i of
// Selector name, or eight copies of its sign where the nibble's high bit is set.
template <uint32_t Selector>
__device__ __forceinline__ uint32_t permute_bytes(uint32_t first, uint32_t second) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(first), "r"(second), "n"(Selector));
  return bytes;
}

}  // namespace nf4::cuda
