// Parts of a problem.
#pragma once

#include <cstdint>

namespace nf4::cpu {

// Quantization blocks [begin, end) of a weight: the unit of work of dequantize and quantize. A
// block starts at an even element, so ranges never share a byte.
struct BlockRange {
  int64_t begin;
  int64_t end;
};

// Rows [begin, end) of a matrix.
struct RowRange {
  int64_t begin;
  int64_t end;
};

}  // namespace nf4::cpu
