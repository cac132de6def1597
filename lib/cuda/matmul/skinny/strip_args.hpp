// What a strip kernel gets. No device code: launches are ordinary C++.
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
  int cluster;       // CTAs of a strip, along K
  int cluster_rows;  // of a strip, whose sums a CTA of its cluster adds up
};

}  // namespace nf4::cuda
