// y = x W^T by mma.sync on GPUs that have no wgmma, where skinny kernels cannot run or take longer.
//
// A CTA of eight warps multiplies 256 rows of the weight by 16 to 128 rows of x in K-tiles of 64
// columns. cp.async copies packed codes and x into stages of shared memory, several K-tiles ahead;
// on Turing, which has none, registers hold what is in flight (copies.cuh, row_packed.cuh).
// A warp has 32 rows of the weight and all rows of x: it decodes each code once, in registers, by
// look-ups in a table of pairs (codebook.cuh) or by arithmetic (int4.cuh), as operand A of
// mma.m16n8k16, and loads x as operand B. CTAs share the tiles that do not fill the last wave
// (stream-K), or a tile evenly (split-K, reduce_split.cuh), and add partial sums in the order of
// the CTAs. With many rows of x the bound is latency: each scheduler has two warps, and a warp
// waits for its own decoding. transposed.cuh has the weight of the gradient, for which x is dY.
// docs/design/matmul-multistage.md has the cycle counts and experiments.
#pragma once

#include <cuda_runtime.h>

#include "cuda/matmul/multistage/epilogue.cuh"
#include "cuda/matmul/multistage/mainloop.cuh"
#include "cuda/matmul/multistage/reduce_split.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

struct ThisCta {
  __device__ __forceinline__ int cta() const { return static_cast<int>(blockIdx.x); }
  __device__ __forceinline__ int ctas() const { return static_cast<int>(gridDim.x); }
};

template <class T, class Args>
__device__ __forceinline__ YTile<T> y_tile(const Args &args, int64_t first_n, int64_t first_m) {
  const auto &matmul = args.matmul;
  const T *const bias = static_cast<const T *>(matmul.bias);
  return {static_cast<T *>(matmul.y) + first_m * matmul.y_stride + first_n,
          matmul.y_stride,
          matmul.m - first_m,
          matmul.weight.rows - first_n,
          bias == nullptr ? nullptr : bias + first_n,
          nullptr,
          args.y_vectors};
}

// Stores y from the sums of MTiles times 8 rows of x.
template <class Weight, int MTiles>
__device__ __forceinline__ void finish_tile(const typename Weight::Args &args, int64_t first_n,
                                            int64_t first_m, float (&sums)[2][MTiles][4]) {
  Weight::finish_sums(args, first_n, first_m, sums);
  store_y(y_tile<typename Weight::Element>(args, first_n, first_m), sums);
}

// The tiles of 8 rows of x that a CTA tile has from first_m on.
template <int TileM, class Args>
__device__ __forceinline__ int m_tiles_from(const Args &args, int64_t first_m) {
  return static_cast<int>(min((args.matmul.m - first_m + 7) / 8, int64_t{TileM / 8}));
}

// Reduces this CTA's slice of a tile that CTAs share evenly, and stores y.
template <class Weight, int TileM>
__device__ __forceinline__ void finish_slice(const typename Weight::Args &args, bool all_run) {
  using Reduction = SplitKReduction<typename Weight::Args, TileM / 8>;
  const TilePart part = StreamKTiles<ThisCta>(args.schedule).part();
  const int own_warp = static_cast<int>(threadIdx.x / 32);
  const int64_t first_n = int64_t{part.n_tile} * kMultistageTileN - own_warp * kMultistageWarpN;
  const int64_t first_m = int64_t{part.m_tile} * TileM;
  Reduction(args).reduce(all_run, m_tiles_from<TileM>(args, first_m),
                         [&](int warp, int m_tile, typename Reduction::PieceSums &piece) {
                           // A lane adds the rows of its own warp.
                           finish_tile<Weight>(args, first_n + warp * kMultistageWarpN,
                                               first_m + m_tile * 8, piece);
                         });
}

template <class Weight, int TileM>
__global__ void __launch_bounds__(kMultistageThreads, 1)
    matmul_multistage(const __grid_constant__ typename Weight::Args args) {
  using Mainloop = MultistageMainloop<Weight, TileM>;
  using Arch = typename Weight::Arch;
  using T = typename Weight::Element;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  const SplitKReduction<typename Weight::Args, TileM / 8> split(args);
  // On Turing it takes registers that the mainloop needs.
  const bool splits = Arch::kTensorCores && args.schedule.tile_ctas > 0;
  if (splits) split.announce();
  Mainloop mainloop(args, dynamic, Weight::fill(args, dynamic));
  __syncthreads();
  const StreamKPartials<typename Weight::Args, TileM / 8> partials(args);
  const StreamKReduction<typename Weight::Args, TileM / 8> reduction(args);
  bool all_run = false;  // the CTAs of split-K
  for (StreamKTiles<ThisCta> tiles(args.schedule); tiles.is_valid(); tiles.advance()) {
    const TilePart part = tiles.part();
    const int64_t first_n = int64_t{part.n_tile} * kMultistageTileN;
    const int64_t first_m = int64_t{part.m_tile} * TileM;
    typename Mainloop::Sums sums;
    mainloop.run(x_rows<T, TileM>(args.matmul, first_m, part.k_tile), first_n, part.k_tile,
                 part.k_tile_end - part.k_tile, sums);
    const int m_tiles = m_tiles_from<TileM>(args, first_m);
    if (!part.stores_y || splits) {
      if (splits) all_run = split.all_run();
      partials.store(sums, m_tiles);
      if (splits) break;
      reduction.announce();
      continue;
    }
    reduction.add_peers(part.first_peer, m_tiles, sums);
    finish_tile<Weight>(args, first_n, first_m, sums);
  }
  // Behind the loop: in it, the compiler would keep no uniform registers in the mainloop.
  if (splits) finish_slice<Weight, TileM>(args, all_run);
}

}  // namespace
}  // namespace nf4::cuda
