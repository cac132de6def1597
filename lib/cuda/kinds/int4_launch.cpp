// Launches of products of integer weights.

#include "cuda/matmul/kernels.hpp"
#include "cuda/matmul/launch.hpp"
#include "cuda/matmul/mma/launch.hpp"
#include "cuda/matmul/multistage/launch.hpp"
#include "cuda/matmul/skinny/launch.hpp"
#include "cuda/matmul/wgmma/launch.hpp"
#include "cuda/matmul/wgmma/tile.hpp"
#include "cuda/matmul_grouped/launch.hpp"
#include "cuda/runtime/families.hpp"
#include "cuda/runtime/shared_memory.hpp"

namespace nf4::cuda {
namespace {

cudaError_t allow_skinny(const GpuFamily &family, const Device &device) {
  return allow_shared_memory<&Int4MatmulKernels::skinny>(family, device);
}

}  // namespace

Int4DecodeArgs decode_args(const Int4Weight &weight, nf4_dtype, const MatmulConfig &) {
  return {static_cast<int>(ceil_divide(weight.group_size, kStepK))};
}

bool has_scale_vectors(const Int4Weight &) { return false; }

cudaError_t make_weight_map(const Int4Weight &weight, int tile_n, TensorMap &map) {
  if (weight.layout == NF4_INT4_GPTQ)
    return make_word_tensor_map({weight.packed, weight.cols / 8, weight.rows * 4}, tile_n,
                                kTileK / 8, map);
  if (weight.layout == NF4_INT4_AWQ)
    return make_tensor_map({weight.packed, weight.cols, weight.rows / 2}, weight.rows / 2,
                           tile_n / 2, kTileK, map);
  return make_tensor_map({weight.packed, weight.rows, weight.cols / 2}, weight.cols / 2, kTileK / 2,
                         tile_n, map);
}

cudaError_t run_mma(const MatmulTarget &target, const Int4MatmulProblem &problem,
                    const Int4MatmulArgs &args) {
  const Int4Weight &weight = problem.weight;
  const Int4MatmulKernels &kernels = kernels_of<Int4MatmulKernels>(*target.family);
  const int dtype = problem.dtype - NF4_DTYPE_FP16, layout = weight.layout - NF4_INT4_GPTQ;
  const bool by_column = weight.g_idx != nullptr;
  const void *const few = kernels.few[dtype][layout][by_column];
  if (few != nullptr && problem.m <= kFewRowsOfX) return launch_mma_few(target, few, args);
  return launch_mma(target, kernels.mma[dtype][layout][by_column], args);
}

cudaError_t run_skinny(const MatmulTarget &target, const Int4MatmulProblem &problem,
                       const Int4MatmulArgs &args, int config) {
  if (const cudaError_t error = allow_skinny(*target.family, target.device)) return error;
  return launch_skinny(target, args, problem.dtype, config);
}

cudaError_t run_multistage(const MatmulTarget &target, const Int4MatmulProblem &problem,
                           const Int4MatmulArgs &args, int config) {
  return launch_multistage(target, problem, args, config);
}

cudaError_t load_family_kernels(const GpuFamily &family, const Device &device, const Int4Weight &) {
  cudaError_t error = load_kernels(kernels_of<Int4MatmulKernels>(family));
  if (error == cudaSuccess) error = allow_skinny(family, device);
  return error == cudaSuccess ? load_multistage_kernels<Int4Weight>(family, device) : error;
}

const void *experts_mma_kernel(const GroupedKernels &kernels, const Int4GroupedProblem &problem) {
  return kernels.int4_mma[problem.dtype - NF4_DTYPE_FP16][problem.weight.layout - NF4_INT4_GPTQ];
}

}  // namespace nf4::cuda
