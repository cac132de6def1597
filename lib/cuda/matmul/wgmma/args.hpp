// The arguments of a wgmma kernel.
#pragma once

#include <cstdint>

#include "cuda/matmul/args.hpp"
#include "cuda/runtime/fast_divide.hpp"
#include "cuda/runtime/tensor_map.hpp"
#include "cuda/weight/lut_codebook.hpp"

namespace nf4::cuda {

// `View` is that of a kind of weight, `DecodeArgs` what decodes its codes.
template <class View, class DecodeArgs>
struct WgmmaArgsOf {
  MatmulArgsOf<View> matmul;
  TensorMap weight_map;  // boxes of a K-tile
  TensorMap x_map;       // boxes of a step
  DecodeArgs decode;
  // cluster_size CTAs make a tile, each from a part of the columns (split-K): cta_k_tiles K-tiles,
  // and one more in the first big_ctas CTAs. In stream-K kernels they are neighbours in the grid,
  // in others a cluster. Each such group takes every `clusters`-th tile.
  int tiles;
  int n_tiles;
  int m_tiles;
  int raster_group;  // tiles of x that are made with one row of tiles before the next
  int cluster_size;
  int clusters;
  FastDivisor cluster_divisor;  // for fewer than 1024 CTAs
  int cta_k_tiles;
  int big_ctas;
  // Stream-K, where cluster_size is 1: all CTAs share the first tiles, as many as the last waves of
  // whole tiles would have. Their K-tiles are numbered one tile after the other;
  // a CTA has stream_k_cta_k_tiles of them, and one more if it is among the first
  // stream_k_big_ctas.
  int stream_k_tiles;  // 0 in other kernels, and with split-K
  int k_tiles;         // K-tiles of one tile
  int stream_k_cta_k_tiles;
  int stream_k_big_ctas;
  uint64_t *flags;     // one a CTA and warp: the signature, once its partial sums are stored
  uint64_t signature;  // this launch's own
  float4 *partials;    // partial sums that CTAs store for others
  bool scale_vectors;  // scales may be loaded several steps at once (scale_loader.cuh)
  bool y_vectors;      // rows of y are 16-byte aligned
};

// An adapter: k_tiles more for each tile, of a K-step each.
struct WgmmaLora {
  TensorMap product_map;  // scale * x A^T: boxes of a K-step's bytes, half of which are read
  TensorMap out_map;      // B, in the gradient A^T: boxes of kLoraTileK ranks
  int k_tiles;
  int k_steps;  // steps of 16 ranks
};

struct WgmmaArgs : WgmmaArgsOf<WeightView, LutCodebook> {
  WgmmaLora lora;
};

struct Int4DecodeArgs {
  int group_steps;  // K-steps that share a scale
};
using Int4WgmmaArgs = WgmmaArgsOf<Int4View, Int4DecodeArgs>;

}  // namespace nf4::cuda
