#include "cuda/matmul_grouped/wgmma_int4_kernels.cuh"

namespace nf4::cuda {

template GroupedInt4WgmmaKernels<NF4_INT4_GPTQ>
GroupedInt4WgmmaKernels<NF4_INT4_GPTQ>::make<NF4_FAMILY>();

}  // namespace nf4::cuda
