// Kernels that tests run around those under test.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nf4::test {

// Keeps the stream busy.
void launch_spin(long long cycles, cudaStream_t stream);

// Occupies this many multiprocessors of a Hopper GPU for kernels that need one to themselves.
cudaError_t launch_occupy(int multiprocessors, long long cycles, cudaStream_t stream);

// Copies late: it lets its dependents start at once, if they were launched to do so, and begins
// after this many cycles.
void launch_late_copy(uint8_t *to, const uint8_t *from, size_t bytes, long long cycles,
                      cudaStream_t stream);

// Puts the context into an error that no call clears.
void launch_trap(cudaStream_t stream);

// Writes one byte, wherever that is.
void launch_write_byte(uint8_t *address);

}  // namespace nf4::test
