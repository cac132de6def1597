// prmt.b32 (PTX ISA, "prmt"). __byte_perm is the same without the signs of bytes.
#pragma once

#include <cstdint>

namespace nf4::cuda {

// Each nibble of Selector selects a byte of the result: its low three bits number the bytes of
// `first` from 0 and those of `second` from 4. With its high bit set, the byte of the result is
// eight copies of the sign of the one that is selected.
template <uint32_t Selector>
__device__ __forceinline__ uint32_t permute_bytes(uint32_t first, uint32_t second) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(first), "r"(second), "n"(Selector));
  return bytes;
}

}  // namespace nf4::cuda
