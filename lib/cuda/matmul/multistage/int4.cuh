// Integer weights, for the multistage kernels. Decoding is arithmetic (int4_decode.cuh), so there
// are no tables, and their shared memory holds more stages.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/int4.hpp"
#include "cuda/element.cuh"
#include "cuda/matmul/configs.hpp"
#include "cuda/matmul/multistage/args.hpp"
#include "cuda/matmul/multistage/int4_layout.cuh"
#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/weight/int4_decode.cuh"
#include "cuda/weight/int4_scale.cuh"

namespace nf4::cuda {
namespace {

// The scale and the zero point of this lane's own row. Those of a group are finished while the next
// group's are in flight. A K-tile lies in one group.
template <class T, ScaleOn On, class Layout>
class GroupScales {
  static constexpr nf4_int4_layout kLayout = Layout::kLayout;
  static constexpr bool kByRows = kLayout == NF4_INT4_COMPRESSED_TENSORS;  // [n][group]

 public:
  using OfTile = Int4Scale[4];  // the lane's four rows have these in a K-tile
  static constexpr bool kThroughSharedMemory = false;

  // `first_row` is the CTA tile's.
  __device__ __forceinline__ GroupScales(const Int4MultistageArgs &args, const uint8_t *,
                                         int64_t first_row, int k_tile)
      : args_(args) {
    const Int4View &weight = args.matmul.weight;
    // Past the last row of the weight are copies of it.
    const int64_t row = min(first_row + threadIdx.x, weight.rows - 1);
    const int group = k_tile / args.group_tiles;
    left_ = (group + 1) * args.group_tiles - k_tile;
    groups_ = static_cast<int>(weight.groups) - group;
    const Int4Place zero = int4_zero(kLayout, weight.rows, weight.groups, row, group);
    zeros_ = weight.zeros + zero.word;
    zero_shift_ = zero.shift;
    scales_ = weight.scales + int4_scale(kLayout, weight.rows, weight.groups, row, group);
    load();
  }
  // Waits for the first scales.
  __device__ __forceinline__ void begin() {
    finish();
    load();
  }

  // Goes on to the next K-tile.
  __device__ __forceinline__ void next(float) {
    if (left_ == 0) {
      left_ = args_.group_tiles;
      finish();
      load();
    }
    --left_;
  }

  // Gets the scales of the K-tile from the lanes that have them.
  __device__ __forceinline__ void share(OfTile &of_row) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      of_row[i].scale = __shfl_sync(0xffffffffu, present_.scale, Layout::row(i));
      of_row[i].minus_zero = __shfl_sync(0xffffffffu, present_.minus_zero, Layout::row(i));
    }
  }

 private:
  // Starts to load those of the next group.
  __device__ __forceinline__ void load() {
    const Int4View &weight = args_.matmul.weight;
    if (--groups_ < 0) return;
    scale_ = *scales_;
    scales_ += kByRows ? 1 : weight.rows;
    if (weight.zeros == nullptr) return;
    zero_ = *zeros_;
    zeros_ += kByRows ? 1 : int4_words(weight.rows);
  }

  __device__ __forceinline__ void finish() {
    const Int4View &weight = args_.matmul.weight;
    const uint32_t zero = weight.zeros == nullptr
                              ? kInt4SymmetricZero
                              : int4_zero_word(zero_, weight.zero_offset) >> zero_shift_ & 15u;
    const float minus_zero = static_cast<float>(zero) * (-1 / NibbleNumber<T>::kUnit);
    const float scale = scale_to_float(weight.fp16_scales, scale_);
    present_.minus_zero = pack_pair(T{}, minus_zero, minus_zero);
    present_.scale = On == ScaleOn::kSums
                         ? __float_as_uint(scale)
                         : pack_pair(T{}, scale, scale - to_float(from_float<T>(scale)));
  }

  const Int4MultistageArgs &args_;
  const uint16_t *scales_;
  const uint32_t *zeros_;
  int zero_shift_;
  int groups_;          // groups that are not loaded yet
  int left_;            // K-tiles of the present group
  uint16_t scale_ = 0;  // the next group's, like zero_, as stored
  uint32_t zero_ = 0;
  Int4Scale present_;
};

template <class Arch_, class Type, class Layout, ScaleOn On>
class MultistageInt4 {
  using Nibbles = typename Layout::template Nibbles<Type>;
  using Decode =
      std::conditional_t<On == ScaleOn::kSums, Int4Codes<Type, Nibbles>, Int4Scaled<Type, Nibbles>>;

 public:
  using Arch = Arch_;
  using Args = Int4MultistageArgs;
  using Element = Type;
  using Scales = GroupScales<Type, On, Layout>;
  using Loader = typename Layout::template Loader<Arch>;
  using Words = typename Layout::Words;
  static constexpr WeightKind kKind = WeightKind::kInt4;
  static constexpr ScaleOn kScaleOn = On;

  static __device__ __forceinline__ float fill(const Args &, uint8_t *) { return 1.0f; }

  __device__ __forceinline__ MultistageInt4(const Args &, const uint8_t *) {}

  static __device__ __forceinline__ float factor(const Int4Scale &scale) {
    return __uint_as_float(scale.scale);
  }

  // The codes of two k-steps, in the bytes where Nibbles finds them.
  struct Looked {
    uint32_t codes[16];
  };

  template <int Half>
  __device__ __forceinline__ void look_up(Looked &to, const Words &words,
                                          const typename Scales::OfTile &, int step) const {
    to.codes[step] = Layout::template start_decode<Half>(words, step / 4, step % 4);
  }
  // Makes the fragment of columns 2 (step % 4) and the next one of row step / 4.
  __device__ __forceinline__ void decode(uint32_t (&a)[2][2][4], const Looked &from,
                                         const typename Scales::OfTile &of_row, int step) const {
    const int row = step / 4, pair = step % 4;
    a[pair / 2][row / 2][row % 2 + pair % 2 * 2] = decode_(from.codes[step], row % 2, of_row[row]);
  }

  template <int MTiles>
  static __device__ __forceinline__ void finish_sums(const Args &, int64_t, int64_t,
                                                     float (&sums)[2][MTiles][4]) {
#pragma unroll
    for (auto &rows : sums)
#pragma unroll
      for (auto &tile : rows)
#pragma unroll
        for (float &sum : tile) sum = multiply_rn(Decode::kUnit, sum);
    Layout::order_rows(sums);
  }

 private:
  const Decode decode_{nullptr};
};

}  // namespace
}  // namespace nf4::cuda
