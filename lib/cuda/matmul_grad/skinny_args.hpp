// The arguments of a skinny kernel of the gradient. No device code: launches are ordinary C++.
#pragma once

#include "core/formats.hpp"
#include "cuda/matmul/args.hpp"
#include "cuda/matmul/skinny/strip_args.hpp"
#include "cuda/matmul_grad/skinny_smem.hpp"
#include "cuda/runtime/tensor_map.hpp"

namespace nf4::cuda {

// Names are those of strips: x is dY, its columns are the weight's rows (K-tiles); y is dX.
struct GradStripArgs {
  MatmulArgs matmul;
  TensorMap packed;
  TensorMap x;
  RoundedCodebook codebook;  // in fp16; sums are multiplied by its unit
  int k_tiles;
  int cluster;       // CTAs of a strip, along the weight's rows
  int cluster_rows;  // columns of a strip whose sums one CTA of its cluster adds up
};

template <int kMaxM>
constexpr GradStripSmem kGradStripSmem = grad_strip_smem(kMaxM);

}  // namespace nf4::cuda
