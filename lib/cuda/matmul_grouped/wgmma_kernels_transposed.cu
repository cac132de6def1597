// The grouped wgmma kernels of the gradient, which multiply with W^T of a weight with a codebook.
#include "cuda/matmul/wgmma/transposed.cuh"
#include "cuda/matmul_grouped/wgmma_kernel_table.cuh"

namespace nf4::cuda {
namespace {

struct GroupedTransposed {
  using W = TransposedWeight;
  static constexpr bool kAlongK = true;
  template <class T>
  using Kind = TransposedKind<false>;
  template <class T, class Tile>
  using Decode = TransposedDecode<T>;
};

}  // namespace

template <class Arch>
GroupedGradWgmmaKernels GroupedGradWgmmaKernels::make() {
  return {grouped_kernels<GroupedTransposed>()};
}

template GroupedGradWgmmaKernels GroupedGradWgmmaKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
