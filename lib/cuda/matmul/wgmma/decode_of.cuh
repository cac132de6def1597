// The decode policy for a codebook's codes in a wgmma kernel; it depends on whether scales multiply
// sums or weights.
#pragma once

#include "cuda/matmul/configs.hpp"
#include "cuda/weight/decode.cuh"

namespace nf4::cuda {
namespace {

template <class T, ScaleOn>
struct CodebookDecode {
  using Type = LutEntries<T>;
};
template <>
struct CodebookDecode<__half, ScaleOn::kWeights> {
  using Type = LutScaledFp16;
};
template <>
struct CodebookDecode<__nv_bfloat16, ScaleOn::kWeights> {
  using Type = LutScaledBf16;
};

}  // namespace
}  // namespace nf4::cuda
