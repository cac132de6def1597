// The limit of the multistage kernels: up to how many rows of x they are expected to take less time
// than dequantize and a dense product (docs/design/path.md). No CUDA types.
#pragma once

#include <algorithm>
#include <cstdint>

namespace nf4::cuda {

struct MultistageLimit {
  int compute_capability;
  bool turing;  // the kernels of Turing
  bool gradient;
  bool adapter;

  // For a weight of so many elements. 0: a dense product takes less time for any number of rows.
  constexpr int64_t rows(int64_t elements) const {
    constexpr int64_t kMostOnTuring = 64, kMostOnBlackwell = 16;
    // The kernels decode a weight anew for every 128 rows of x. Smaller weights are quick to
    // dequantize, and have fewer tiles than the GPU has multiprocessors.
    const int64_t size = turing ? elements / 2 : elements;  // the kernels take 1.4 times as long
    int64_t most = size >= kLarge ? 128 : size >= kLarge / 2 ? 64 : size >= kLarge / 4 ? 32 : 0;
    // The gradient's kernels, and those with an adapter, gain less.
    if ((gradient || adapter) && elements < kLarge / 2) most = 0;
    if (gradient && adapter) most /= 2;
    if (turing) most = adapter ? 0 : std::min(most, kMostOnTuring);
    // Dense products have faster tensor cores than mma.sync there.
    const int major = compute_capability / 10;
    return major == 10 || major == 11 ? std::min(most, kMostOnBlackwell) : most;
  }

  static constexpr int64_t kLarge = int64_t{1} << 25;  // elements
};

}  // namespace nf4::cuda
