// MXFP4 and NVFP4 weights, for the wgmma kernels. A LUT and a product decode two weights. The 16
// columns of a wgmma share a scale, so scales multiply weights in every tile.
#pragma once

#include <cstdint>

#include "cuda/matmul/wgmma/codebook.cuh"
#include "cuda/matmul/wgmma/e2m1_scale_loader.cuh"
#include "cuda/weight/e2m1.cuh"

namespace nf4::cuda {
namespace {

struct E2m1Code {
  uint32_t word;
  int mma;  // the wgmma of the step that multiplies it
};

struct E2m1Packed : RowPacked {
  // See RowPacked::decode. decode(code, half) gets an E2m1Code.
  template <class Decode>
  static __device__ __forceinline__ void decode(uint32_t (&a)[4][4], const Words &from,
                                                Decode decode) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        const uint4 words = from.words[half][chunk];
        const int mma = chunk * 2;
        a[mma][half] = decode(E2m1Code{words.x, mma}, half);
        a[mma][half + 2] = decode(E2m1Code{words.y, mma}, half);
        a[mma + 1][half] = decode(E2m1Code{words.z, mma + 1}, half);
        a[mma + 1][half + 2] = decode(E2m1Code{words.w, mma + 1}, half);
      }
  }
};

template <class T>
class E2m1Decode {
 public:
  using Element = T;

  template <int Threads>
  static __device__ __forceinline__ float build(const LutCodebook &own, const float *, uint8_t *lut,
                                                int thread) {
    float unit;
    const uint32_t entry =
        E2m1<T>::with_factor(lane_entry<T>(own.rounded, /*codebook=*/nullptr, unit));
    fill_lut<4, Threads>(lut, thread, entry, pack_low_first);
    return unit;
  }

  __device__ __forceinline__ explicit E2m1Decode(const uint8_t *lut) : entries_(lut) {}

  // `scales` has those of the step's wgmmas.
  __device__ __forceinline__ uint32_t operator()(E2m1Code code, int, uint2 scales) const {
    const uint32_t two = code.mma < 2 ? scales.x : scales.y;
    return E2m1<T>::multiply(entries_(code.word), E2m1<T>::twice(two, code.mma % 2));
  }

 private:
  LutEntries<T> entries_;
};

// T is the type of x.
template <class T, bool Lora>
struct E2m1Kind : CodebookKind<Lora> {
  using Scale = uint2;  // four numbers of T, one for each wgmma of a step
  template <int TileN>
  using Layout = E2m1Packed;
  static constexpr ScaleOn scale_on(ScaleOn) { return ScaleOn::kWeights; }

  static constexpr bool kGlobalScales = true;
  static constexpr int kScaleCodeBytes = 0;

  template <class Tile, class Scheduler>
  static __device__ __forceinline__ void load_scales(const typename Tile::Args &args,
                                                     SharedStorage<Tile> shared, int thread) {
    E2m1ScaleLoader<T, Tile> loader(args, shared, thread);
    for_each_work_tile<Scheduler>(args, [&](const Scheduler &scheduler) {
      const WorkTile work = scheduler.work_tile();
      loader.load(work, scheduler.n_end(work));
      loader.pass(lora_k_tiles<Tile>(args, work));
    });
  }

  // Multiplies a lane's sums by the global scales.
  template <class Tile>
  static __device__ __forceinline__ void scale_sums(const typename Tile::Args &args,
                                                    const WorkTile &work,
                                                    typename Tile::Accumulators &sums) {
    const GlobalScales scales(args.matmul.weight);
    if (!scales.exist()) return;
    const int row = work.n + lane_row<RowPacked>();
    const float of[] = {scales.of(row), scales.of(row + RowPacked::kRowDistance)};
#pragma unroll
    for (int i = 0; i < Tile::kTileM / 2; ++i) sums[i] = multiply_rn(sums[i], of[i % 4 / 2]);
  }
};

struct E2m1Floats {
  static constexpr WgmmaTable kTable = WgmmaTable::kE2m1;
  static constexpr WeightKind kKind = WeightKind::kE2m1;
  static constexpr bool kExpertsAlongK = false;
  static constexpr bool kLora = true;
  static constexpr bool lora_apart(const MatmulConfig &) { return false; }

  template <class T, bool Lora>
  using TileKind = E2m1Kind<T, Lora>;
  template <class T, class Tile>
  using Decode = E2m1Decode<T>;
};

}  // namespace
}  // namespace nf4::cuda
