// The wgmma kernels of one kind of weight; compiled once for each kind, which meson names in
// NF4_WGMMA_KIND.
#include "cuda/matmul/wgmma/kernel_table.cuh"
#include "cuda/matmul/wgmma/kinds.cuh"

namespace nf4::cuda {

using Kernels = WgmmaKernelsOf<NF4_WGMMA_KIND::kTable, false>;

template <>
template <>
Kernels Kernels::make<NF4_FAMILY>() {
  return WgmmaTableMaker<NF4_WGMMA_KIND, OneWeight>::make();
}

}  // namespace nf4::cuda
