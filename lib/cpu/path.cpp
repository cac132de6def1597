// Decides which way of computing a product is expected to take less time on the CPU (nf4_path).
// docs/design/path.md has the figures.
#include "cpu/backend.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace nf4::cpu {
namespace {

// Checks for instructions that multiply tiles of bf16 (AMX), and for an operating system that saves
// their registers: a dense product is likely to use them, and libnf4 has no kernels for them.
bool find_amx() {
#if defined(__x86_64__)
  constexpr uint32_t kOsxsave = 1u << 27, kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  constexpr uint32_t kTileState = 3u << 17;
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kOsxsave) == 0) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & (kAmxBf16 | kAmxTile)) != (kAmxBf16 | kAmxTile)) return false;
  uint32_t low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileState) == kTileState;
#else
  return false;
#endif
}

}  // namespace

// The gradient of many rows in bf16 decodes the weight for each of them.
nf4_path path_of(const MatmulProblem &problem) {
  static const bool has_amx = find_amx();
  const int64_t rows = has_amx ? 16 : 256;
  const bool dense = problem.gradient && problem.dtype == NF4_DTYPE_BF16 && problem.m > rows;
  return dense ? NF4_PATH_DENSE : NF4_PATH_FUSED;
}

}  // namespace nf4::cpu
