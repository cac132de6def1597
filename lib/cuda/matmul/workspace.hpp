// The workspace of matmul. Plain C++, compiled without CUDA too: sizes do not depend on the build.
#pragma once

#include <cstdint>

#include "cuda/lora/workspace.hpp"
#include "cuda/matmul/configs.hpp"
#include "cuda/weight/transposed.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// The workspace of a product depends on these.
struct MatmulSize {
  nf4_dtype dtype;
  int64_t m;
  int64_t rows;
  int64_t cols;
  int64_t scale_columns;  // length of an aligned run that kernels treat as having one scale
  WeightKind kind;
};
MatmulSize size_of(const MatmulProblem &problem);
MatmulSize size_of(const Int4MatmulProblem &problem);
MatmulSize size_of(const GradProblem &problem);

// Returns whether the workspace of such a product has room for a stream-K configuration.
bool workspace_holds(const MatmulSize &size, int config);

// The part of the workspace that stream-K kernels exchange sums through: a flag for each warp of a
// CTA, then the partial sums of each CTA. The GPU is not known here, so it is large enough for any
// Hopper GPU, and for the multistage kernels on any other.
struct MatmulWorkspace {
  static constexpr int64_t kMaxCtas = 144;
  static constexpr int64_t kFlags = 16;  // flags of a CTA, of 8 bytes: one a warp, 128 bytes in all
  static constexpr int64_t kMinKTiles = 4;  // the fewest K-tiles of a CTA
  // The same for the multistage kernels, for any GPU that has no wgmma.
  static constexpr int64_t kMaxMultistageCtas = 192;

  int64_t ctas = 0;
  int64_t sums_bytes = 0;

  explicit MatmulWorkspace(const MatmulSize &size);
  template <class W>
  explicit MatmulWorkspace(const MatmulProblemOf<W> &problem) : MatmulWorkspace(size_of(problem)) {}
  int64_t flags_bytes() const { return ctas * kFlags * 8; }
  int64_t bytes() const { return flags_bytes() + sums_bytes; }

 private:
  // Makes room for the sums of a configuration whose K-tiles have these columns.
  void add(const MatmulSize &size, int config, int64_t tile_k, int64_t max_ctas,
           int64_t min_k_tiles);
};

// Returns the bytes of the adapter's part, which lies behind the rest of the workspace of a product
// or gradient (lora/workspace.hpp).
int64_t lora_workspace_bytes(const MatmulProblem &problem);

// Returns the bytes of the copy of x with its columns in the order of the weight's, which lies
// behind MatmulWorkspace; 0 if x needs no copy.
int64_t permuted_x_bytes(const Int4MatmulProblem &problem);

}  // namespace nf4::cuda
