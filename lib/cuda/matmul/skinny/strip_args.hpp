// The arguments of a strip kernel. No device code: launches are ordinary C++.
#pragma once

#include "cuda/matmul/args.hpp"
#include "cuda/matmul/skinny/strip_smem.hpp"
#include "cuda/runtime/tensor_map.hpp"

namespace nf4::cuda {

template <int kWarpsN>
constexpr int kStripRows = strip_rows(kWarpsN);
template <int kWarpsN>
constexpr int kStripWarpsK = strip_warps_k(kWarpsN);
template <int kWarpsN, int kMaxM>
constexpr StripSmem kStripSmem = strip_smem(kWarpsN, kMaxM);

struct StripArgs {
  Int4MatmulArgs matmul;
  TensorMap packed;
  TensorMap x;
  int k_tiles;
  int cluster;       // CTAs that share a strip along K
  int cluster_rows;  // rows of the strip whose sums one CTA of the cluster adds up
};

}  // namespace nf4::cuda
