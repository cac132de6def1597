#include "cuda/matmul/kernels.cuh"
#include "nf4_gpu_families.hpp"

namespace nf4::cuda {
namespace {
constexpr int kArchs[] = {NF4_ARCHS_SM75};
}
const MatmulFamily kMatmulSm75 = matmul_family<Sm75>(family<Sm75>(kArchs, NF4_PTX_SM75));
}  // namespace nf4::cuda
