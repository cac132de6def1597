// The workspace of matmul. Plain C++, compiled without CUDA too: sizes do not depend on the build.
#pragma once

#include <cstdint>

#include "cuda/lora/workspace.hpp"
#include "cuda/matmul/configs.hpp"
#include "cuda/weight/transposed.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// What the workspace of a product depends on.
struct MatmulSize {
  nf4_dtype dtype;
  int64_t m;
  int64_t rows;
  int64_t cols;
  int64_t scale_columns;  // that share a scale, from a multiple of them on
  WeightKind kind;
};
MatmulSize size_of(const MatmulProblem &problem);
MatmulSize size_of(const Int4MatmulProblem &problem);
MatmulSize size_of(const GradProblem &problem);

// Whether a stream-K configuration is one that the workspace of such a product is made for.
bool workspace_holds(const MatmulSize &size, int config);

// What the stream-K kernels exchange: a flag for each warp of a CTA, then the partial sums
// of each CTA. Which GPU it will be is not known here, so it is large enough for any Hopper.
struct MatmulWorkspace {
  static constexpr int64_t kMaxCtas = 144;
  static constexpr int64_t kFlags = 16;     // of a CTA, of 8 bytes: a warp's each, up to 128 bytes
  static constexpr int64_t kMinKTiles = 4;  // of a CTA

  int64_t ctas = 0;
  int64_t sums_bytes = 0;

  explicit MatmulWorkspace(const MatmulSize &size);
  template <class W>
  explicit MatmulWorkspace(const MatmulProblemOf<W> &problem) : MatmulWorkspace(size_of(problem)) {}
  int64_t flags_bytes() const { return ctas * kFlags * 8; }
  int64_t bytes() const { return flags_bytes() + sums_bytes; }
};

// Of the adapter, behind the rest of a product's or gradient's workspace (lora/workspace.hpp).
int64_t lora_workspace_bytes(const MatmulProblem &problem);

// Of x with its columns in the order of the weight's, behind MatmulWorkspace; 0 if they are.
int64_t permuted_x_bytes(const Int4MatmulProblem &problem);

}  // namespace nf4::cuda
