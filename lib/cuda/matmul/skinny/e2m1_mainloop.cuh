// A warp's product of a warp tile of an MXFP4 or NVFP4 weight with its part of x. With up to 2 rows
// of x, scales multiply the sums of 16 columns. With more rows a lane has other columns, and scales
// multiply the weights.
#pragma once

#include "cuda/matmul/skinny/e2m1_scale_stage.cuh"
#include "cuda/matmul/skinny/epilogue.cuh"
#include "cuda/matmul/skinny/mainloop.cuh"
#include "cuda/weight/e2m1.cuh"

namespace nf4::cuda {
namespace {

// One of the two bf16 numbers of a word.
__device__ __forceinline__ float half_of(uint32_t word, int upper) {
  return __uint_as_float(upper ? word & 0xffff0000u : word << 16);
}

// A look-up times a scale.
template <class T, class AnyLut>
struct ScaledPairs {
  AnyLut lut;
  uint32_t scale;  // twice

  template <int Byte>
  __device__ __forceinline__ uint32_t pair(uint32_t word) const {
    return E2m1<T>::multiply(lut.template pair<Byte>(word), scale);
  }
};

template <class T, class Arch = Sm80>
struct E2m1MmaM2 : WarpMmaM2<T, Arch>, E2m1Mma {
  static constexpr bool kKeepsLane = false;  // scales need the registers

  // See WarpMmaM2::add.
  template <class Tile, class AnyLut, class FindScales>
  __device__ __forceinline__ void add(const Tile &tile, AnyLut lut, FindScales find_scales,
                                      bool accumulate, float *partial) const {
    const TileScaleBytes scales = find_scales();
    uint32_t of[4];
    scales.of_columns(FragmentLane().thread_in_group, of);
    E2m1<__nv_bfloat16>::to_scales(scales.kind, of);  // which holds every scale; fp16 does not
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 w = this->words(tile, i, 0), w8 = this->words(tile, i, 1);
      float d[2][1][4] = {};  // sums over 16 columns each
      mma_word<T, Arch>(lut, w.x, w8.x, this->x, i * 16, d[0]);
      mma_word<T, Arch>(lut, w.y, w8.y, this->x, i * 16 + 4, d[0]);
      mma_word<T, Arch>(lut, w.z, w8.z, this->x, i * 16 + 8, d[1]);
      mma_word<T, Arch>(lut, w.w, w8.w, this->x, i * 16 + 12, d[1]);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          sums[k] = __fmaf_rn(half_of(of[k / 2 * 2 + i], half) * (1 / E2m1<T>::kFactor),
                              d[half][0][k], sums[k]);
    }
    store_quad_sums(sums, accumulate, partial);
  }
};

template <class T, int MTiles, class Arch = Sm80>
struct E2m1MmaM8 : WarpMmaM8<T, MTiles, Arch>, E2m1Mma {
  // See WarpMmaM2::add.
  template <class Tile, class AnyLut, class FindScales>
  __device__ __forceinline__ void add(const Tile &tile, AnyLut lut, FindScales find_scales,
                                      bool accumulate, float *partial) const {
    using Pairs = ScaledPairs<T, AnyLut>;
    const FragmentLane lane;
    const TileScaleBytes scales = find_scales();
    // Two chains of products wait less for each other; two tiles are as many.
    constexpr int kChains = MTiles == 1 ? 2 : 1;
    float d[kChains][MTiles][4] = {};
    uint32_t of[2];  // the scales of two blocks, of each row
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (block % 2 == 0) {
        scales.of_blocks(lane.thread_in_group, block / 2, of);
        E2m1<T>::to_scales(scales.kind, of);
      }
      const uint2 w = this->words(tile, block, 0), w8 = this->words(tile, block, 1);
      const Pairs pairs{lut, E2m1<T>::twice(of[0], block % 2)};
      const Pairs pairs8{lut, E2m1<T>::twice(of[1], block % 2)};
      mma_word<T, Arch>(pairs, pairs8, w.x, w8.x, this->x, block * 8, d[0]);
      mma_word<T, Arch>(pairs, pairs8, w.y, w8.y, this->x, block * 8 + 4, d[kChains - 1]);
    }
    if constexpr (kChains == 2)
#pragma unroll
      for (int k = 0; k < 4; ++k) d[0][0][k] += d[1][0][k];
    store_sums(lane, d[0], accumulate, partial);
  }
};

// The type that multiplies a weight with such scales.
template <class T, class Scales, class Arch = Sm80>
using SkinnyMmaM2 =
    std::conditional_t<Scales::kLowNibbleFirst, E2m1MmaM2<T, Arch>, WarpMmaM2<T, Arch>>;
template <class T, class Scales, int MTiles, class Arch = Sm80>
using SkinnyMmaM8 = std::conditional_t<Scales::kLowNibbleFirst, E2m1MmaM8<T, MTiles, Arch>,
                                       WarpMmaM8<T, MTiles, Arch>>;

}  // namespace
}  // namespace nf4::cuda
