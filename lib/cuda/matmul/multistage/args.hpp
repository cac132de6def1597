// The arguments of a multistage kernel.
#pragma once

#include <cstdint>

#include "cuda/matmul/args.hpp"
#include "cuda/weight/lut_codebook.hpp"

namespace nf4::cuda {

// How the tiles of y are divided among CTAs. All CTAs share the K-tiles of the first shared_tiles
// tiles, as many as the last waves of whole tiles would have (stream-K): those K-tiles are numbered
// one tile after the other, and a CTA has cta_k_tiles of them, and one more if it is among the
// first big_ctas. Of the other tiles, each CTA has every gridDim.x-th.
struct TileSchedule {
  int tiles;
  int n_tiles;
  int m_tiles;
  int raster_group;  // tiles of x that each row of tiles of the weight meets before the next row
  int k_tiles;       // of a tile
  int shared_tiles;
  int cta_k_tiles;
  int big_ctas;
};

struct MultistageArgs {
  MatmulArgs matmul;
  LutCodebook decode;
  TileSchedule schedule;
  uint64_t *flags;     // of each CTA: the signature, once its partial sums are stored
  uint64_t signature;  // this launch's own
  float *partials;     // partial sums that CTAs store for others
  bool scale_pairs;    // scales may be loaded for two K-tiles at once
  bool y_vectors;      // four neighbours in y may be stored at once
};

}  // namespace nf4::cuda
