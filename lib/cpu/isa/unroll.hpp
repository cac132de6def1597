// Unrolls a loop whose arrays must be in registers.
#pragma once

#if defined(__clang__)
#define NF4_UNROLL _Pragma("clang loop unroll(full)")
#else
#define NF4_UNROLL _Pragma("GCC unroll 16")
#endif
