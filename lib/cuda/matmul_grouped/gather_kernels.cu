#include "cuda/matmul_grouped/gather.cuh"

namespace nf4::cuda {

template <class Arch>
GatherKernels GatherKernels::make() {
  return {(const void *)gather_rows<Sm90>};
}
template GatherKernels GatherKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
