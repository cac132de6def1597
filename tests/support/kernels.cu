#include "support/kernels.hpp"

namespace nf4::test {
namespace {

__global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}

__global__ void trap() { asm volatile("trap;"); }

}  // namespace

void launch_spin(long long cycles, cudaStream_t stream) { spin<<<1, 1, 0, stream>>>(cycles); }

void launch_trap(cudaStream_t stream) { trap<<<1, 1, 0, stream>>>(); }

}  // namespace nf4::test
