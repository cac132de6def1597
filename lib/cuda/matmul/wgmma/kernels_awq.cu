#include "cuda/matmul/wgmma/int4_kernels.cuh"

namespace nf4::cuda {

template Int4WgmmaKernels<NF4_INT4_AWQ> Int4WgmmaKernels<NF4_INT4_AWQ>::make<NF4_FAMILY>();

}  // namespace nf4::cuda
