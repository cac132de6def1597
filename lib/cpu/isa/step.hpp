// What every instruction set takes.
#pragma once

namespace nf4::cpu {

// Kernels get elements in multiples of this, so they have no tails: their callers pad.
constexpr int kKernelStep = 32;

}  // namespace nf4::cpu
