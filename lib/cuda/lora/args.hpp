// An adapter (LoRA) as kernels get it: y += scale * (x A^T) B^T. No device code.
#pragma once

#include <cstdint>

namespace nf4::cuda {

// A factor of the adapter: element (rank r, column or row i) at r * rank_stride + i * stride.
struct LoraFactor {
  const void *data;
  int64_t rank_stride;
  int64_t stride;
  bool is_fp32;  // else in x's dtype
};

// What an epilogue adds to an output: the scaled product of its row of x, times its row of B.
struct LoraTerm {
  // scale * x A^T: [m][product_stride], in x's dtype; skinny kernels make their own.
  const void *product;
  LoraFactor b;
  int product_stride;  // a multiple of 16; zeros past the rank
  int rank;            // 0: there is no adapter
  bool b_vectors;      // b's rows load as vectors of eight
};

// What every kernel that multiplies x by a factor gets: what it reads, and where the product goes.
struct LoraProductOperands {
  const void *x;
  int64_t x_stride;
  int64_t m;
  int64_t cols;
  LoraFactor in;  // A, or in the gradient the transpose of B
  float scale;
  int rank;
  int stride;     // of `scaled`: whole sixteens of ranks
  void *product;  // [m][rank], or NULL
  void *scaled;   // [m][stride], times the scale; zeros past the rank
};

struct LoraProductArgs : LoraProductOperands {
  LoraFactor out;  // B, or in the gradient the transpose of A: copied for TMA
  void *out_copy;  // [lora_copy_rows()][stride] in x's dtype, zeros past the rank; or NULL
  int64_t out_rows;
  bool permuted;  // its rows, as transposed wgmma kernels have them
  // CTAs: clusters of 2^cluster_log2 share the columns of a tile of x and ranks; those after the
  // first product_ctas copy `out`.
  int rank_chunks;
  int cluster_log2;
  int product_ctas;
  int copy_ctas;
};

constexpr int kLoraProductThreads = 256;
constexpr int kMaxLoraClusterLog2 = 3;  // what any GPU allows

}  // namespace nf4::cuda
