#include "cuda/matmul/wgmma/int4_kernels.cuh"

namespace nf4::cuda {

template Int4WgmmaKernels<NF4_INT4_COMPRESSED_TENSORS>
Int4WgmmaKernels<NF4_INT4_COMPRESSED_TENSORS>::make<NF4_FAMILY>();

}  // namespace nf4::cuda
