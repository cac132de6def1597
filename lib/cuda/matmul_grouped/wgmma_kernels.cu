// The grouped wgmma kernels of a weight with a codebook: for Hopper and experts with many rows.
#include "cuda/matmul/wgmma/codebook.cuh"
#include "cuda/matmul/wgmma/decode_of.cuh"
#include "cuda/matmul_grouped/gather.cuh"
#include "cuda/matmul_grouped/wgmma_kernel_table.cuh"

namespace nf4::cuda {
namespace {

struct GroupedCodebook {
  using W = Weight;
  static constexpr bool kAlongK = false;
  template <class T>
  using Kind = CodebookKind<false>;
  template <class T, class Tile>
  using Decode = typename CodebookDecode<T, Tile::kScaleOn>::Type;
};

}  // namespace

template <class Arch>
GroupedWgmmaKernels GroupedWgmmaKernels::make() {
  return {grouped_kernels<GroupedCodebook>(), (const void *)gather_rows<Sm90>};
}

template GroupedWgmmaKernels GroupedWgmmaKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
