#include "cuda/matmul/kernels.cuh"
#include "nf4_gpu_families.hpp"

namespace nf4::cuda {
namespace {
constexpr int kArchs[] = {NF4_ARCHS_SM90};
}
const MatmulFamily kMatmulSm90 = matmul_family<Sm90>(family<Sm90>(kArchs, NF4_PTX_SM90));
}  // namespace nf4::cuda
