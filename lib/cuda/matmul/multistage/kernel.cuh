// y = x W^T by mma.sync on GPUs that have no wgmma, where skinny kernels cannot run or take longer.
//
// A CTA of eight warps multiplies 256 rows of the weight by 16 to 128 rows of x in K-tiles of 64
// columns. cp.async copies packed codes and x into stages of shared memory, several K-tiles ahead;
// on Turing, which has none, registers hold what is in flight (copies.cuh, row_packed.cuh).
// A warp has 32 rows of the weight and all rows of x: it decodes each code once, in registers, by
// look-ups in a table of pairs (codebook.cuh) or by arithmetic (int4.cuh), as operand A of
// mma.m16n8k16, and loads x as operand B. CTAs share the tiles that do not fill the last wave
// (stream-K), and add partial sums in the order of the CTAs. With many rows of x the bound is
// latency: each scheduler has two warps, and a warp waits for its own decoding. transposed.cuh has
// the weight of the gradient, for which x is dY.
// docs/design/matmul-multistage.md has the cycle counts and experiments.
#pragma once

#include <cuda_runtime.h>

#include "cuda/matmul/multistage/epilogue.cuh"
#include "cuda/matmul/multistage/mainloop.cuh"
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

template <class Weight, int TileM>
__global__ void __launch_bounds__(kMultistageThreads, 1)
    matmul_multistage(const __grid_constant__ typename Weight::Args args) {
  using Mainloop = MultistageMainloop<Weight, TileM>;
  using Arch = typename Weight::Arch;
  using T = typename Weight::Element;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  Mainloop mainloop(args, dynamic, Weight::fill(args, dynamic));
  __syncthreads();
  const StreamKReduction<typename Weight::Args, TileM / 8> reduction(args);
  for (StreamKTiles<ThisCta> tiles(args.schedule); tiles.is_valid(); tiles.advance()) {
    const TilePart part = tiles.part();
    const int64_t first_n = int64_t{part.n_tile} * kMultistageTileN;
    const int64_t first_m = int64_t{part.m_tile} * TileM;
    typename Mainloop::Sums sums;
    mainloop.run(x_rows<T, TileM>(args.matmul, first_m, part.k_tile), first_n, part.k_tile,
                 part.k_tile_end - part.k_tile, sums);
    if (!part.stores_y) {
      reduction.store(sums);
      continue;
    }
    reduction.add(part.first_peer, sums);
    Weight::finish_sums(args, first_n, first_m, sums);
    store_y(y_tile<T>(args, first_n, first_m), sums);
  }
}

}  // namespace
}  // namespace nf4::cuda
