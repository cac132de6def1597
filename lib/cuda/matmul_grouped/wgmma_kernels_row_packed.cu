#include "cuda/matmul_grouped/wgmma_int4_kernels.cuh"

namespace nf4::cuda {

template GroupedInt4WgmmaKernels<NF4_INT4_COMPRESSED_TENSORS>
GroupedInt4WgmmaKernels<NF4_INT4_COMPRESSED_TENSORS>::make<NF4_FAMILY>();

}  // namespace nf4::cuda
