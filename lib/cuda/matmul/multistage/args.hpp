// The arguments of a multistage kernel.
#pragma once

#include <cstdint>

#include "cuda/matmul/args.hpp"
#include "cuda/matmul/multistage/scheduler.hpp"
#include "cuda/weight/lut_codebook.hpp"

namespace nf4::cuda {

// `Matmul` is the arguments of a product with a kind of weight.
template <class Matmul>
struct MultistageArgsOf {
  Matmul matmul;
  TileSchedule schedule;
  uint64_t *flags;     // one a CTA: the signature, once its partial sums are stored
  uint64_t signature;  // this launch's own
  float *partials;     // partial sums that CTAs store for others
  bool y_vectors;      // four neighbours in y may be stored at once
};
struct MultistageArgs : MultistageArgsOf<MatmulArgs> {
  LutCodebook decode;
  bool scale_pairs;  // scales may be loaded for two K-tiles at once
};
struct Int4MultistageArgs : MultistageArgsOf<Int4MatmulArgs> {
  int group_tiles;  // K-tiles of a group
};

}  // namespace nf4::cuda
