// The CUDA backend: what api.cpp calls. stub.cpp answers in its place in a build
// without CUDA.
#pragma once

#include "problem.hpp"

namespace nf4::cuda {

nf4_status dequant(const DequantProblem &problem, nf4_stream stream);
nf4_status quantize(const QuantizeProblem &problem, nf4_stream stream);
nf4_status matmul(const MatmulProblem &problem, nf4_stream stream);
nf4_status device_info(int device, nf4_device &info);

}  // namespace nf4::cuda
