// The grouped wgmma kernels of integer weights in one layout.
#pragma once

#include "cuda/matmul/wgmma/int4_kernels.cuh"
#include "cuda/matmul_grouped/wgmma_kernel_table.cuh"

namespace nf4::cuda {
namespace {

template <nf4_int4_layout Layout>
struct GroupedInt4 {
  using W = Int4Weight;
  static constexpr bool kAlongK = Layout != NF4_INT4_COMPRESSED_TENSORS;
  template <class T>
  using Kind = Int4Kind<T, Layout>;
  template <class T, class Tile>
  using Decode = typename Int4DecodeOf<T, Tile>::Type;
};

}  // namespace

template <nf4_int4_layout Layout>
template <class Arch>
GroupedInt4WgmmaKernels<Layout> GroupedInt4WgmmaKernels<Layout>::make() {
  return {grouped_kernels<GroupedInt4<Layout>>()};
}

}  // namespace nf4::cuda
