#include "support/kernels.hpp"

namespace nf4::test {
namespace {

__global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}

__global__ void trap() { asm volatile("trap;"); }

__global__ void write_byte(uint8_t *address) { *address = 1; }

}  // namespace

void launch_spin(long long cycles, cudaStream_t stream) { spin<<<1, 1, 0, stream>>>(cycles); }

void launch_trap(cudaStream_t stream) { trap<<<1, 1, 0, stream>>>(); }

void launch_write_byte(uint8_t *address) { write_byte<<<1, 1>>>(address); }

}  // namespace nf4::test
