// Fills tables of multistage kernels, which have an entry for each configuration.
#pragma once

#include <type_traits>
#include <utility>

#include "cuda/matmul/configs.hpp"

namespace nf4::cuda {

template <class KernelOf, int... Index>
void fill_multistage(const void *(&kernels)[kMultistageCount], KernelOf kernel_of,
                     std::integer_sequence<int, Index...>) {
  ((kernels[Index] = kernel_of(std::integral_constant<int, kFirstMultistage + Index>())), ...);
}
// Calls kernel_of with each configuration, which is a std::integral_constant.
template <class KernelOf>
void fill_multistage(const void *(&kernels)[kMultistageCount], KernelOf kernel_of) {
  fill_multistage(kernels, kernel_of, std::make_integer_sequence<int, kMultistageCount>());
}

}  // namespace nf4::cuda
