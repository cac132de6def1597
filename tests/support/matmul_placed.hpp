// A random matmul in a GPU's memory, and the check of every kernel on it.
#pragma once

#include <array>
#include <cstdint>
#include <map>

#include "cuda/matmul/matmul.hpp"
#include "support/device.hpp"
#include "support/matmul_cases.hpp"
#include "support/matmul_expected.hpp"

namespace nf4::test {

template <class Host>
struct PlacedMatmulOf {
  DeviceWeightOf<Host> weight;
  DeviceBuffer x, bias, y, workspace;

  // With `aligned`, everything is on 256-byte boundaries, which all kernels' loads allow; otherwise
  // only sometimes.
  PlacedMatmulOf(Rng &rng, const MatmulCaseOf<Host> &test, bool aligned);

  nf4_matmul_args args(const MatmulCaseOf<Host> &test) const;
  // The configuration that a launch uses: the forced one, or kMma64x64 if that one cannot run.
  int used(const MatmulCaseOf<Host> &test) const;
  nf4_status multiply(const MatmulCaseOf<Host> &test, cudaStream_t stream) const;
};
using PlacedMatmul = PlacedMatmulOf<HostWeight>;

// 16-bit numbers are rounded once before they are multiplied: the codebook's entries over the
// largest of them, or those times the scale. Sums are in binary32.
template <class Host>
bool is_right(const MatmulCaseOf<Host> &test, const Expected &expected, double y);

// The number of times that each configuration of each family ran.
using MatmulCounts = std::map<const cuda::GpuFamily *, std::array<int, cuda::kMatmulConfigCount>>;

enum class Judged { kEach, kEachAndAll };

// A range of kMatmulConfigs.
struct ConfigRange {
  int first = cuda::kMma64x64;
  int end = cuda::kMatmulConfigCount;
};

// Runs every kernel of every family that takes the case, of these configurations, each with aligned
// memory and with memory as it comes.
template <class Host>
void check_matmul(MatmulCaseOf<Host> &test, Rng &rng, const Stream &stream, MatmulCounts &counts,
                  Judged judged = Judged::kEach, ConfigRange configs = {});

}  // namespace nf4::test
