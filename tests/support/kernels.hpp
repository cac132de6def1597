// Kernels that tests need around those under test.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nf4::test {

// Keeps the stream busy.
void launch_spin(long long cycles, cudaStream_t stream);

// Takes so many multiprocessors of Hopper from kernels that want one to themselves.
cudaError_t launch_occupy(int multiprocessors, long long cycles, cudaStream_t stream);

// Copies, but late: it lets its dependents start at once, as far as they were launched so,
// and begins after so many cycles.
void launch_late_copy(uint8_t *to, const uint8_t *from, size_t bytes, long long cycles,
                      cudaStream_t stream);

// Puts the context into an error that no call clears.
void launch_trap(cudaStream_t stream);

// Writes one byte, wherever that is.
void launch_write_byte(uint8_t *address);

}  // namespace nf4::test
