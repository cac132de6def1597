#include "cuda/quantize/scales.cuh"
#include "cuda/quantize/weights.cuh"
#include "nf4_gpu_families.hpp"

namespace nf4::cuda {
namespace {
constexpr int kArchs[] = {NF4_ARCHS_BASELINE};
}
const QuantizeFamily kQuantizeBaseline = {
    {"baseline", kArchs, NF4_PTX_BASELINE},
    {(const void *)quantize_weights<float>, (const void *)quantize_weights<__half>,
     (const void *)quantize_weights<__nv_bfloat16>},
    (const void *)sum_scales,
    (const void *)reduce_sums,
    (const void *)quantize_scales,
};
}  // namespace nf4::cuda
