#include "cuda/matmul/wgmma/int4_kernels.cuh"

namespace nf4::cuda {

template Int4WgmmaKernels<NF4_INT4_GPTQ> Int4WgmmaKernels<NF4_INT4_GPTQ>::make<NF4_FAMILY>();

}  // namespace nf4::cuda
