// Dequantize's kernel, nested, in every launch configuration that might be chosen: what the
// sweep times. For the architectures of the sm90 family.
#include "configurations.hpp"
#include "cuda/dequant/aligned.cuh"

namespace nf4::bench {
namespace {

template <int Threads, int Tile, int Resident>
Configuration configuration() {
  using cuda::dequant_aligned;
  using cuda::NestedScales;
  using cuda::Sm90;
  return {
      {Threads, Tile, Resident},
      {(const void *)dequant_aligned<Sm90, float, NestedScales, Threads, Tile, Resident>,
       (const void *)dequant_aligned<Sm90, __half, NestedScales, Threads, Tile, Resident>,
       (const void *)dequant_aligned<Sm90, __nv_bfloat16, NestedScales, Threads, Tile, Resident>}};
}

}  // namespace

const std::vector<Configuration> &configurations() {
  static const std::vector<Configuration> all = {
      configuration<64, 512, 2048>(),   configuration<128, 512, 2048>(),
      configuration<256, 512, 2048>(),  configuration<512, 512, 2048>(),
      configuration<1024, 512, 2048>(), configuration<64, 1024, 1024>(),
      configuration<128, 1024, 1024>(), configuration<256, 1024, 1024>(),
      configuration<512, 1024, 1024>(), configuration<64, 1024, 2048>(),
      configuration<128, 1024, 2048>(), configuration<256, 1024, 2048>(),
      configuration<512, 1024, 2048>(), configuration<128, 2048, 1024>(),
      configuration<256, 2048, 1024>(),
  };
  return all;
}

}  // namespace nf4::bench
