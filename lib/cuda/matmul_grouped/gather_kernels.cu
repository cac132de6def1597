// Instantiates the kernel that gathers x for the grouped wgmma kernels; compiled for Hopper alone.
#include "cuda/matmul_grouped/gather.cuh"

namespace nf4::cuda {

template <class Arch>
GatherKernels GatherKernels::make() {
  return {(const void *)gather_rows<Sm90>};
}
template GatherKernels GatherKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
