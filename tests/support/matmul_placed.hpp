// A random matmul in a GPU's memory, and the check of every kernel on it.
#pragma once

#include <array>
#include <cstdint>
#include <map>

#include "cuda/matmul/matmul.hpp"
#include "support/device.hpp"
#include "support/matmul_cases.hpp"

namespace nf4::test {

struct PlacedMatmul {
  DeviceWeight weight;
  DeviceBuffer x, bias, y, workspace;

  // aligned: all of it on 256-byte boundaries, where all kernels' loads may be; else now and then.
  PlacedMatmul(Rng &rng, const MatmulCase &test, bool aligned);

  nf4_matmul_args args(const MatmulCase &test) const;
  // The configuration that a launch uses: the forced one, or kMma64x64 where that one cannot.
  int used(const MatmulCase &test) const;
  nf4_status multiply(const MatmulCase &test, cudaStream_t stream) const;
};

// How often each configuration of each family did the work.
using MatmulCounts = std::map<const cuda::GpuFamily *, std::array<int, cuda::kMatmulConfigCount>>;

enum class Judged { kEach, kEachAndAll };

// Of kMatmulConfigs.
struct ConfigRange {
  int first = cuda::kMma64x64;
  int end = cuda::kMatmulConfigCount;
};

// Every kernel of every family that takes the case, of these configurations, each with it aligned
// and as it comes.
void check_matmul(MatmulCase &test, Rng &rng, const Stream &stream, MatmulCounts &counts,
                  Judged judged = Judged::kEach, ConfigRange configs = {});

}  // namespace nf4::test
