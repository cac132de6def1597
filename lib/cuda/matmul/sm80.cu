#include "cuda/matmul/kernels.cuh"
#include "nf4_gpu_families.hpp"

namespace nf4::cuda {
namespace {
constexpr int kArchs[] = {NF4_ARCHS_SM80};
}
const MatmulFamily kMatmulSm80 = matmul_family<Sm80>(family<Sm80>(kArchs, NF4_PTX_SM80));
}  // namespace nf4::cuda
