// MXFP4 and NVFP4 weights, for the multistage kernels. A lane's 16 columns of a row and K-tile
// share a scale, since blocks have 16 or 32 columns. A look-up and a product decode two weights, so
// that tiles with few rows of x need no sums of a K-tile.
#pragma once

#include <cstdint>

#include "cuda/matmul/multistage/args.hpp"
#include "cuda/matmul/multistage/codebook.cuh"
#include "cuda/matmul/multistage/epilogue.cuh"
#include "cuda/matmul/multistage/row_packed.cuh"
#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/weight/e2m1.cuh"

namespace nf4::cuda {
namespace {

// The scale bytes of this lane's own row, those of a K-tile in one load, two K-tiles ahead. A table
// in shared memory, behind the LUT, has what a byte multiplies weights by.
class RowScaleBytes {
 public:
  using OfTile = uint32_t[4];  // twice the scale of the lane's columns, for each of its rows
  static constexpr bool kThroughSharedMemory = false;

  // `first_row` is the CTA tile's.
  __device__ __forceinline__ RowScaleBytes(const MultistageArgs &args, const uint8_t *tables,
                                           int64_t first_row, int k_tile)
      : table_(reinterpret_cast<const uint32_t *>(tables + kMultistageLutBytes)),
        log2_(args.matmul.weight.blocksize_log2),
        left_(args.schedule.k_tiles - k_tile),
        byte_(0x4440 | threadIdx.x % 4 >> (log2_ - 4)) {
    const WeightView &weight = args.matmul.weight;
    // Past the last row of the weight are copies of it.
    const int64_t row = min(first_row + threadIdx.x, weight.rows - 1);
    from_ = static_cast<const uint8_t *>(weight.absmax) + (row * weight.cols >> log2_) +
            (k_tile * kMultistageTileK >> log2_);
    load();
    next_ = loaded_;
    load();
  }
  __device__ __forceinline__ void begin() const {}

  // Goes on to the next K-tile.
  __device__ __forceinline__ void next(float) {
    own_ = next_;
    next_ = loaded_;
    load();
  }

  // Gets the scales of the K-tile from the lanes that have their bytes.
  __device__ __forceinline__ void share(OfTile &of_row) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t bytes = __shfl_sync(0xffffffffu, own_, threadIdx.x % 32 / 4 * 4 + i);
      of_row[i] = table_[__byte_perm(bytes, 0, byte_)];
    }
  }

 private:
  // Starts to load the bytes of the next K-tile.
  __device__ __forceinline__ void load() {
    if (--left_ < 0) return;
    loaded_ = log2_ == 4 ? *reinterpret_cast<const uint32_t *>(from_)
                         : *reinterpret_cast<const uint16_t *>(from_);
    from_ += kMultistageTileK >> log2_;
  }

  const uint32_t *const table_;
  const int log2_;  // log2 of the blocksize: 4 or 5
  int left_;        // K-tiles to load
  const uint32_t byte_;
  const uint8_t *from_;
  uint32_t own_ = 0, next_ = 0, loaded_ = 0;
};

template <class Arch_, class T>
class E2m1Weight {
  using Lut = PairLut<uint32_t>;

 public:
  using Arch = Arch_;
  using Args = MultistageArgs;
  using Scales = RowScaleBytes;
  using Element = T;
  using Loader = RowPackedLoader<Arch>;
  using Words = RowPackedWords;
  static constexpr WeightKind kKind = WeightKind::kE2m1;
  static constexpr ScaleOn kScaleOn = ScaleOn::kWeights;
  static_assert(Lut::kBytes == kMultistageLutBytes);
  static_assert(kMultistageThreads * sizeof(uint32_t) == kMultistageCodeBytes);

  static __device__ __forceinline__ float fill(const Args &args, uint8_t *shared) {
    Lut::fill(shared, E2m1<T>::pair(args.decode.exact, threadIdx.x));
    uint32_t scale[] = {threadIdx.x * 0x10001u};
    E2m1<T>::to_scales(args.matmul.weight.scale_bytes, scale);
    reinterpret_cast<uint32_t *>(shared + kMultistageLutBytes)[threadIdx.x] = scale[0];
    return 1.0f;
  }

  __device__ __forceinline__ E2m1Weight(const Args &, const uint8_t *shared) : lut_(shared) {}

  // CodebookWeight has the same.
  struct Looked {
    uint32_t pairs[16];
  };
  template <int Half>
  __device__ __forceinline__ void look_up(Looked &to, const Words &words, const Scales::OfTile &,
                                          int step) const {
    to.pairs[step] = lut_.pair(words.word<Half>(step / 4), step % 4);
  }
  static __device__ __forceinline__ void decode(uint32_t (&a)[2][2][4], const Looked &from,
                                                const Scales::OfTile &scale, int step) {
    const int row = step / 4, byte = step % 4;
    a[byte / 2][row / 2][row % 2 + byte % 2 * 2] = E2m1<T>::multiply(from.pairs[step], scale[row]);
  }

  // Multiplies the sums by the global scales. `first_n` is a row of the whole weight.
  template <int MTiles>
  static __device__ __forceinline__ void scale_sums(const Args &args, int64_t first_n,
                                                    float (&sums)[2][MTiles][4]) {
    const GlobalScales scales(args.matmul.weight);
    if (!scales.exist()) return;
    const int64_t n = first_n + threadIdx.x / 32 * kMultistageWarpN + threadIdx.x % 32 / 4 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scale = scales.of(n + i);
#pragma unroll
      for (int m = 0; m < MTiles; ++m)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float &sum = sums[i / 2][m][i % 2 * 2 + j];
          sum = multiply_rn(sum, scale);
        }
    }
  }
  template <int MTiles>
  static __device__ __forceinline__ void finish_sums(const Args &args, int64_t first_n,
                                                     int64_t first_m, float (&sums)[2][MTiles][4]) {
    scale_sums(args, first_n, sums);
    add_lora<Arch, T>(args.matmul, first_n, first_m, sums);
  }

 private:
  const Lut lut_;
};

}  // namespace
}  // namespace nf4::cuda
