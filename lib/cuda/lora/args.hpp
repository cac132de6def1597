// The arguments that describe an adapter (LoRA) to kernels: y += scale * (x A^T) B^T. No device
// code.
#pragma once

#include <cstdint>

namespace nf4::cuda {

// A factor of the adapter. The element of rank r and column or row i is at r * rank_stride + i *
// stride.
struct LoraFactor {
  const void *data;
  int64_t rank_stride;
  int64_t stride;
  bool is_fp32;  // otherwise in x's dtype
};

// The term that an epilogue adds to an output: the scaled product of its row of x, times its row of
// B.
struct LoraTerm {
  // scale * x A^T: [m][product_stride], in x's dtype. Skinny kernels compute it themselves.
  const void *product;
  LoraFactor b;
  int product_stride;  // a multiple of 16; zeros past the rank
  int rank;            // 0: there is no adapter
  bool b_vectors;      // b's rows load as vectors of eight
};

// The operands of every kernel that multiplies x by a factor, and the place of the product.
struct LoraProductOperands {
  const void *x;
  int64_t x_stride;
  int64_t m;
  int64_t cols;
  LoraFactor in;  // A, or in the gradient the transpose of B
  float scale;
  int rank;
  int stride;     // in `scaled`: a multiple of 16 ranks
  void *product;  // [m][rank], or NULL
  void *scaled;   // [m][stride], times the scale; zeros past the rank
};

struct LoraProductArgs : LoraProductOperands {
  LoraFactor out;  // B, or in the gradient the transpose of A: copied for TMA
  void *out_copy;  // [lora_copy_rows()][stride] in x's dtype, zeros past the rank; or NULL
  int64_t out_rows;
  bool permuted;  // with its rows in the order of transposed wgmma kernels
  // In CTAs: clusters of 2^cluster_log2 share the columns of a tile of x and ranks. The CTAs after
  // the first product_ctas copy `out`.
  int rank_chunks;
  int cluster_log2;
  int product_ctas;
  int copy_ctas;
};

constexpr int kLoraProductThreads = 256;
constexpr int kMaxLoraClusterLog2 = 3;  // the most that any GPU allows

}  // namespace nf4::cuda
