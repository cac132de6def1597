// What a wgmma kernel gets.
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
  // A cluster makes a tile, each of its CTAs from a part of the columns (split-K): cta_k_tiles
  // K-tiles, and one more in the first big_ctas CTAs. Each cluster takes every `clusters`-th tile.
  int tiles;
  int n_tiles;
  int m_tiles;
  int raster_group;  // tiles of x that are made with one row of tiles before the next
  int cluster_size;
  int clusters;
  FastDivisor cluster_divisor;  // for fewer than 1024 CTAs
  int cta_k_tiles;
  int big_ctas;
  // Stream-K kernels, whose clusters are single CTAs: all of them share the first tiles, as many as
  // the last waves of whole tiles would have. Their K-tiles are numbered one tile after the other;
  // a CTA has stream_k_cta_k_tiles of them, and one more if it is among the first
  // stream_k_big_ctas.
  int stream_k_tiles;  // 0 in other kernels
  int k_tiles;         // of a tile
  int stream_k_cta_k_tiles;
  int stream_k_big_ctas;
  uint64_t *flags;     // of each CTA and warp: the signature, once its partial sums are stored
  uint64_t signature;  // this launch's own
  float4 *partials;    // partial sums that CTAs store for others
  bool scale_vectors;  // scales may be loaded several steps at once (scale_loader.cuh)
  bool y_vectors;      // rows of y are 16-byte aligned
};

// An adapter: k_tiles more for each tile, of a K-step each.
struct WgmmaLora {
  TensorMap product_map;  // of scale * x A^T: boxes of a K-step's bytes, half of which are read
  TensorMap out_map;      // of B, or in the gradient of A^T: boxes of kLoraTileK ranks
  int k_tiles;
  int k_steps;  // of 16 ranks
};

struct WgmmaArgs : WgmmaArgsOf<WeightView, LutCodebook> {
  WgmmaLora lora;
};

struct Int4DecodeArgs {
  int group_steps;  // K-steps that share a scale
};
using Int4WgmmaArgs = WgmmaArgsOf<Int4View, Int4DecodeArgs>;

}  // namespace nf4::cuda
