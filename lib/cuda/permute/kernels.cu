// Instantiates the kernels that permute columns for one GPU family; compiled once for each family.
#include "cuda/permute/kernels.hpp"
#include "cuda/permute/weight.cuh"
#include "cuda/permute/x.cuh"

namespace nf4::cuda {

template <class Arch>
PermuteKernels PermuteKernels::make() {
  return {(const void *)sort_columns<Arch>,
          (const void *)permute_codes<Arch>,
          (const void *)permute_x<Arch>,
          {(const void *)permute_x_rows<Arch, kPermuteStages[0]>,
           (const void *)permute_x_rows<Arch, kPermuteStages[1]>}};
}

template PermuteKernels PermuteKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
