// A fence for the compiler's instruction scheduler.
#pragma once

namespace nf4::cuda {

// ptxas moves no instruction across this one, a trigger of a performance-monitor event that nothing
// listens to (PTX ISA, "pmevent"). It costs an issue slot.
__device__ __forceinline__ void schedule_fence() { asm volatile("pmevent 1;" ::: "memory"); }

}  // namespace nf4::cuda
