// The kinds of weight of the wgmma kernels, for which each layout of integers is a kind.
// lib/cuda/meson.build lists their names.
#pragma once

#include "cuda/matmul/wgmma/codebook.cuh"
#include "cuda/matmul/wgmma/e2m1.cuh"
#include "cuda/matmul/wgmma/int4.cuh"
#include "cuda/matmul/wgmma/transposed.cuh"

namespace nf4::cuda {
namespace {

using Gptq = Integers<NF4_INT4_GPTQ, WgmmaTable::kGptq>;
using Awq = Integers<NF4_INT4_AWQ, WgmmaTable::kAwq>;
using CompressedTensors = Integers<NF4_INT4_COMPRESSED_TENSORS, WgmmaTable::kCompressedTensors>;

}  // namespace
}  // namespace nf4::cuda
