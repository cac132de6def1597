// Quantizes scales by searches in memory, for instruction sets that have no better way. V is a type
// of an unnamed namespace (matmul/loops.hpp says why).
#pragma once

#include <cstdint>

#include "cpu/quantize/kernels.hpp"

namespace nf4::cpu {

// 8 searches run side by side, without branches, so that their loads overlap.
template <class V>
void encode_scales(const EncodeScalesArgs &args) {
  constexpr int kSearches = 8;
  for (int64_t first = 0; first < args.count; first += kSearches) {
    const int64_t count = args.count - first < kSearches ? args.count - first : kSearches;
    float x[kSearches] = {};
    for (int64_t i = 0; i < count; ++i)
      x[i] = (args.scales[first + i] - args.offset) * args.inverse;
    int codes[kSearches] = {};
    for (int step = 128; step > 0; step /= 2)
      for (int i = 0; i < kSearches; ++i)
        codes[i] += static_cast<int>(x[i] > args.thresholds[codes[i] + step]) * step;
    for (int64_t i = 0; i < count; ++i) args.codes[first + i] = static_cast<uint8_t>(codes[i]);
  }
}

}  // namespace nf4::cpu
