// The element granularity of every instruction set.
#pragma once

namespace nf4::cpu {

// Kernels get multiples of this many elements, so they have no tails; their callers pad.
constexpr int kKernelStep = 32;

}  // namespace nf4::cpu
