// The partial sums of the warps in shared memory, and the outputs to which they add up.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/lora/cta_args.hpp"
#include "cuda/lora/term.cuh"
#include "cuda/matmul/skinny/args.hpp"
#include "cuda/weight/e2m1.cuh"

namespace nf4::cuda {
namespace {

// The rows of the weight that a CTA has. The CTAs' numbers of rows differ by one at most.
struct CtaRows {
  int first;
  int count;
  __device__ __forceinline__ CtaRows(const SkinnyWork &work, int cta)
      : first(cta * work.cta_units + min(cta, work.big_ctas)),
        count(work.cta_units + (cta < work.big_ctas)) {}
  // Rows come in units of `unit` rows.
  __device__ __forceinline__ CtaRows(const SkinnyWork &work, int cta, int unit, int rows)
      : first((cta * work.cta_units + min(cta, work.big_ctas)) * unit),
        count(min((work.cta_units + (cta < work.big_ctas)) * unit, rows - first)) {}
  __device__ __forceinline__ int tiles() const { return (count + kWarpTileN - 1) / kWarpTileN; }
};

// The group of rows of warp tiles on which a CTA works, and the place of their sums.
template <class WarpMma>
struct PartialSums {
  static constexpr int kTilePartials = kWarpTileN * WarpMma::kMaxM;
  int first;
  int end;
  float *partials;  // [tile][warp][fragment row][row of x]

  // A warp's sums for tile `tile` of the group.
  __device__ __forceinline__ float *of_warp(int tile, int warp) const {
    return partials + (tile * kWarpsOf<WarpMma> + warp) * kTilePartials;
  }
};

// Adds up the warps' sums of an output, always in the same order.
template <class WarpMma>
__device__ __forceinline__ float add_partials(const float *partial, int warps) {
  constexpr uint32_t kTilePartials = PartialSums<WarpMma>::kTilePartials;
  float sums[4] = {};
  if (warps == kWarpsOf<WarpMma>) {
#pragma unroll
    for (int warp = 0; warp < kWarpsOf<WarpMma>; ++warp)
      sums[warp % 4] += partial[warp * kTilePartials];
  } else {
#pragma unroll 1
    for (int warp = 0; warp < warps; ++warp) sums[0] += partial[warp * kTilePartials];
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The base of products with MXFP4 and NVFP4 weights, whose outputs have global scales.
struct E2m1Mma {};
template <class WarpMma>
constexpr bool kHasGlobalScales = std::is_base_of_v<E2m1Mma, WarpMma>;

// An output of a group: everything needed to add up the warps' sums and to store it. It is computed
// before the sums are complete.
template <class T, class WarpMma>
class Epilogue {
  static constexpr uint32_t kMaxM = WarpMma::kMaxM, kTilePartials = kWarpTileN * kMaxM;

 public:
  template <class Args>
  __device__ __forceinline__ Epilogue(const Args &args, const CtaRows &rows,
                                      const PartialSums<WarpMma> &group, uint32_t index) {
    const auto &matmul = args.matmul;
    const uint32_t tile = index / kTilePartials, within = index % kTilePartials;
    const uint32_t first_warp =
        args.work.n_warps == 1 ? 0 : tile % args.work.n_warps * args.work.k_warps;
    const uint32_t m = within % kMaxM;
    const int row = (group.first + tile) * kWarpTileN + WarpMma::row_at(within / kMaxM);
    in_bounds_ = (group.first + tile < group.end) & (m < matmul.m) & (row < rows.count);
    if (!in_bounds_) return;
    partial_ = group.of_warp(tile, first_warp) + within;
    y_ = static_cast<T *>(matmul.y) + m * matmul.y_stride + rows.first + row;
    if (matmul.bias != nullptr)
      bias_ = to_float(static_cast<const T *>(matmul.bias)[rows.first + row]);
    if constexpr (kHasGlobalScales<WarpMma>)
      scale_ = GlobalScales(matmul.weight).of(rows.first + row);
  }

  // The adapter's part of output `index`, once its product with x is complete: [m][product_stride +
  // kLoraPadding]. The numbers of B that it reads are prefetched.
  __device__ __forceinline__ void prefetch_lora(const LoraTerm &lora, const CtaRows &rows,
                                                const PartialSums<WarpMma> &group,
                                                uint32_t index) const {
    if (in_bounds_) prefetch_lora_b<T>(lora, row_of(rows, group, index));
  }
  __device__ __forceinline__ void add_lora(const LoraTerm &lora, const float *product,
                                           const CtaRows &rows, const PartialSums<WarpMma> &group,
                                           uint32_t index) {
    if (in_bounds_)
      bias_ += lora_term<T>(lora, product + index % kMaxM * (lora.product_stride + kLoraPadding),
                            row_of(rows, group, index));
  }

  __device__ __forceinline__ void store(int warps, float unit) const {
    if (!in_bounds_) return;
    const float sum = add_partials<WarpMma>(partial_, warps);
    *y_ = from_float<T>(__fmaf_rn(sum, unit * scale_, bias_));
  }

 private:
  static __device__ __forceinline__ int row_of(const CtaRows &rows,
                                               const PartialSums<WarpMma> &group, uint32_t index) {
    return rows.first + (group.first + static_cast<int>(index / kTilePartials)) * kWarpTileN +
           WarpMma::row_at(index % kTilePartials / kMaxM);
  }

  const float *partial_;
  T *y_;
  float bias_ = 0;
  float scale_ = 1;
  bool in_bounds_;
};

}  // namespace
}  // namespace nf4::cuda
