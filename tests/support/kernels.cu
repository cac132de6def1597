#include "support/kernels.hpp"

namespace nf4::test {
namespace {

__device__ void wait_cycles(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}

__global__ void spin(long long cycles) { wait_cycles(cycles); }

__global__ void late_copy(uint8_t *to, const uint8_t *from, size_t bytes, long long cycles) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  wait_cycles(cycles);
  for (size_t i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}

__global__ void trap() { asm volatile("trap;"); }

__global__ void write_byte(uint8_t *address) { *address = 1; }

}  // namespace

void launch_spin(long long cycles, cudaStream_t stream) { spin<<<1, 1, 0, stream>>>(cycles); }

cudaError_t launch_occupy(int multiprocessors, long long cycles, cudaStream_t stream) {
  constexpr int kBytes = 120 << 10;  // more than half of a multiprocessor's
  const cudaError_t error =
      cudaFuncSetAttribute(spin, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  spin<<<multiprocessors, 1, kBytes, stream>>>(cycles);
  return cudaGetLastError();
}

void launch_late_copy(uint8_t *to, const uint8_t *from, size_t bytes, long long cycles,
                      cudaStream_t stream) {
  late_copy<<<1, 256, 0, stream>>>(to, from, bytes, cycles);
}

void launch_trap(cudaStream_t stream) { trap<<<1, 1, 0, stream>>>(); }

void launch_write_byte(uint8_t *address) { write_byte<<<1, 1>>>(address); }

}  // namespace nf4::test
