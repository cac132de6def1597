// GPUs of each kind for which there are kernels (CUDA C++ Programming Guide, technical
// specifications per compute capability).
#pragma once

#include "standin_cuda/standin.hpp"

namespace nf4::test::standin {

constexpr Gpu kT4{75, 40, 64 << 10};
constexpr Gpu kA100{80, 108, 163 << 10};
constexpr Gpu kL4{89, 58, 99 << 10};
constexpr Gpu kH200{90, 132, 227 << 10};
constexpr Gpu kB200{100, 148, 227 << 10};
constexpr Gpu kGpus[] = {kT4, kA100, kL4, kH200, kB200};

}  // namespace nf4::test::standin
