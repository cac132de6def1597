// An adapter (LoRA) of a product, in a GPU's memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "problem.hpp"
#include "support/device.hpp"
#include "support/matmul_cases.hpp"
#include "support/matmul_placed.hpp"

namespace nf4::test {

struct HostAdapter {
  nf4_dtype dtype;
  int rank;
  float scale;
  int64_t a_stride, b_stride;
  std::vector<uint8_t> a, b;  // from the first to the last element; NaN between the rows
};

// Its numbers make the adapter's term about as large as the product.
HostAdapter random_adapter(Rng &rng, const MatmulCase &test, nf4_dtype dtype, int rank,
                           bool padded);

struct PlacedAdapter {
  DeviceBuffer a, b, product, workspace;
  nf4_lora lora{};
  nf4_matmul_args args;
  bool gradient;

  PlacedAdapter(Rng &rng, const MatmulCase &test, const HostAdapter &adapter,
                const PlacedMatmul &placed, bool aligned, bool with_product);
  PlacedAdapter(const PlacedAdapter &) = delete;
  PlacedAdapter &operator=(const PlacedAdapter &) = delete;

  nf4_status multiply(const PlacedMatmul &placed, cudaStream_t stream) const;
  MatmulProblem problem(const PlacedMatmul &placed) const;
  // The configuration that multiply() uses.
  int used(const PlacedMatmul &placed) const;
};

}  // namespace nf4::test
