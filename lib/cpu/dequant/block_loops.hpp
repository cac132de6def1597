// Dequantizes blocks, or groups of integers, with a table of a block's values. Kind describes the
// weights that the kernel is compiled for, and Table looks codes up. Both are types of an unnamed
// namespace (matmul/loops.hpp says why).
#pragma once

#include <cstdint>

#include "cpu/dequant/kernels.hpp"

namespace nf4::cpu {

template <class Kind, class Table>
void dequant(const DequantArgs &args) {
  const uint8_t *packed = args.packed;
  char *out = static_cast<char *>(args.out);
  int64_t block = 0;
  for (int64_t left = args.elements; left > 0; left -= args.blocksize) {
    const Table table(Kind::values(args, block++));
    const int64_t elements = left < args.blocksize ? left : args.blocksize;
    for (int64_t i = 0; i < elements; i += kKernelStep) {
      table.template decode<Kind>(packed, out);
      packed += kKernelStep / 2;
      out += kKernelStep * Table::kBytes;
    }
  }
}

}  // namespace nf4::cpu
