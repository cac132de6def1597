// The tables that a CTA needs to encode: for a format's codebook the compiler makes them; for a
// caller's, the kernel makes them at its start.
#pragma once

#include <cuda_runtime.h>

#include "core/encode.hpp"
#include "cuda/quantize/args.hpp"
#include "cuda/quantize/buckets.hpp"

namespace nf4::cuda {
namespace {

__device__ const FormatTables kFormatTables = make_format_tables();

// make_quantizer() with 16 threads: finds the rank of each entry, then the thresholds. `shared` is
// complete after a barrier.
__device__ __forceinline__ void sort_codebook(const float *codebook, float *sorted,
                                              Quantizer &shared) {
  const int i = threadIdx.x;
  if (i < kCodebookSize) {
    const float entry = __ldg(codebook + i);
    int rank = 0;
    for (int other = 0; other < kCodebookSize; ++other)
      rank += entry_before(__ldg(codebook + other), other, entry, i);
    sorted[rank] = entry;
    shared.codes[rank] = static_cast<uint8_t>(i);
  }
  __syncthreads();
  if (i < kCodebookSize - 1) {
    int low = i;
    while (low >= 0 && sorted[low] == sorted[low + 1]) --low;
    shared.thresholds[i] = low < 0 ? -kLargestFloat : midpoint(sorted[low], sorted[low + 1]);
  }
}

// The tables of the caller's codebook, in shared memory. Contains barriers.
__device__ __noinline__ const Tables &callers_tables(const float *codebook) {
  __shared__ Tables tables;
  __shared__ float sorted[kCodebookSize];
  if (threadIdx.x == 0) tables.crowded = false;
  sort_codebook(codebook, sorted, tables.quantizer);
  __syncthreads();
  if (threadIdx.x < kBuckets) {
    bool crowded = false;
    tables.buckets[threadIdx.x] = make_bucket(tables.quantizer, threadIdx.x, &crowded);
    if (crowded) tables.crowded = true;
  }
  __syncthreads();
  return tables;
}

template <bool CallersCodebook>
__device__ __forceinline__ const Tables &get_tables(const QuantizeArgs &args) {
  if constexpr (CallersCodebook)
    return callers_tables(args.codebook);
  else
    return kFormatTables.of[args.format_row];
}

}  // namespace
}  // namespace nf4::cuda
