// The arguments of the mma and skinny kernels of a grouped matmul; wgmma_args.hpp has those of the
// wgmma kernels. No device code: launches are ordinary C++.
#pragma once

#include <cstdint>

#include "cuda/matmul/args.hpp"
#include "cuda/matmul/skinny/args.hpp"

namespace nf4::cuda {

// The rows of y and x that each expert has, in device memory.
struct Groups {
  const int32_t *ends;     // [experts], the end of each expert's rows of y
  const int32_t *x_index;  // [rows], or NULL: the row of x is that of y
  const float *row_scale;  // [rows], or NULL
  int64_t bias_stride;
  int64_t expert_rows;  // rows of an expert's weight; at most 2^30 for skinny and wgmma kernels
  int32_t experts;
  int32_t rows;  // rows of y
};

// The arguments of mma kernels, which extend those of a product of one weight. The weight is the
// first expert of the stack; m is the number of rows of x.
template <class Args>
struct GroupedArgsOf : Args {
  Groups groups;
};

// The weight is the stack of all experts; for integers, the first expert.
template <class Args>
struct GroupedSkinnyArgsOf : Args {
  Groups groups;
  int expert_tiles;  // rows of warp tiles of an expert
};
using GroupedSkinnyArgs = GroupedSkinnyArgsOf<SkinnyArgs>;
using GroupedInt4SkinnyArgs = GroupedSkinnyArgsOf<Int4SkinnyArgs>;

}  // namespace nf4::cuda
