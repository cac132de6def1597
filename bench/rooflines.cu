// The bandwidth rooflines that kernels are measured against: they move the same bytes and do
// nothing else, with the launch variants and cache hints that our kernels may choose from. A
// figure uses the fastest of them. Test code, for bench_library.hpp.
#include <cuda_runtime.h>

#include <cstdint>

#include "bench_library.hpp"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/runtime/launch.hpp"
#include "problem.hpp"

namespace {

using nf4::cuda::CachePolicy;

// The features of the GPU that this is compiled for.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
using Arch = nf4::cuda::Sm90;
#elif __CUDA_ARCH__ >= 800
using Arch = nf4::cuda::Sm80;
#else
using Arch = nf4::cuda::Sm75;
#endif

constexpr int kThreads = 256;

struct Traffic {
  const void *in;          // read once
  const uint32_t *scales;  // read once, beside it
  void *out;               // written once
  int64_t in_vectors;      // in units that a thread loads at a time
  int64_t scale_words;
  int prefetch_blocks;
  bool evict_first;
};

__device__ __forceinline__ CachePolicy output_policy(const Traffic &args) {
  return args.evict_first ? nf4::cuda::evict_first<Arch>() : nf4::cuda::evict_normal<Arch>();
}

// Where a lane's first vector is; the others follow 32 apart, so that a warp's accesses are
// contiguous.
template <int Loads>
__device__ __forceinline__ int64_t first_vector() {
  return int64_t{blockIdx.x} * kThreads * Loads + threadIdx.x / 32 * 32 * Loads + threadIdx.x % 32;
}

__device__ __forceinline__ uint4 vary(uint32_t word) {
  return {word, word ^ 0x11u, word ^ 0x22u, word ^ 0x33u};
}

// Dequantize's traffic: each 4-byte word read becomes Stores 16-byte vectors written, 1 for
// 16-bit outputs, 2 for 32-bit.
template <int Loads, int Stores>
__global__ void __launch_bounds__(kThreads) expand(const __grid_constant__ Traffic args) {
  nf4::cuda::pdl_wait<Arch>();
  nf4::cuda::pdl_launch_dependents<Arch>();
  const CachePolicy once = nf4::cuda::evict_first<Arch>();
  const CachePolicy policy = output_policy(args);
  const auto *in = static_cast<const uint32_t *>(args.in);
  const int64_t first = first_vector<Loads>();
  uint32_t words[Loads];
#pragma unroll
  for (int i = 0; i < Loads; ++i)
    words[i] = first + i * 32 < args.in_vectors
                   ? nf4::cuda::load_once<Arch>(in + first + i * 32, once)
                   : 0;
  const int scales_per_block = static_cast<int>((args.scale_words + gridDim.x - 1) / gridDim.x);
  const int64_t scale = int64_t{blockIdx.x} * scales_per_block + threadIdx.x;
  if (threadIdx.x < scales_per_block && scale < args.scale_words)
    words[0] ^= __ldg(args.scales + scale);
  if constexpr (Arch::kBulkPrefetch) {
    const int64_t ahead = int64_t{blockIdx.x} + args.prefetch_blocks;
    if (args.prefetch_blocks != 0 && threadIdx.x == 0 && ahead + 1 < gridDim.x)
      nf4::cuda::prefetch_l2<Arch>(in + ahead * kThreads * Loads, kThreads * Loads * 4);
  }
  auto *out = static_cast<uint4 *>(args.out);
#pragma unroll
  for (int i = 0; i < Loads; ++i)
#pragma unroll
    for (int j = 0; j < Stores; ++j) {
      const int64_t word = first + i * 32;
      const int lane = threadIdx.x % 32;
      if (word < args.in_vectors)
        nf4::cuda::store_once<Arch>(out + (word - lane) * Stores + j * 32 + lane, vary(words[i]),
                                    policy);
    }
}

// Quantize's traffic: of each 16 bytes read, 4 are written for 16-bit inputs (Halve false),
// 2 for 32-bit.
template <int Loads, bool Halve>
__global__ void __launch_bounds__(kThreads) shrink(const __grid_constant__ Traffic args) {
  nf4::cuda::pdl_wait<Arch>();
  nf4::cuda::pdl_launch_dependents<Arch>();
  const CachePolicy once = nf4::cuda::evict_first<Arch>();
  const auto *in = static_cast<const uint4 *>(args.in);
  const int64_t first = first_vector<Loads>();
  uint32_t words[Loads];
#pragma unroll
  for (int i = 0; i < Loads; ++i) {
    uint4 v{};
    if (first + i * 32 < args.in_vectors) v = nf4::cuda::load_once<Arch>(in + first + i * 32, once);
    words[i] = v.x ^ v.y ^ v.z ^ v.w;
  }
#pragma unroll
  for (int i = 0; i < Loads; ++i) {
    const int64_t vector = first + i * 32;
    if (vector >= args.in_vectors) continue;
    if constexpr (Halve)
      static_cast<uint16_t *>(args.out)[vector] = static_cast<uint16_t>(words[i]);
    else
      static_cast<uint32_t *>(args.out)[vector] = words[i];
  }
}

// Reads everything once and writes next to nothing.
template <int Loads>
__global__ void __launch_bounds__(kThreads) read(const __grid_constant__ Traffic args) {
  nf4::cuda::pdl_wait<Arch>();
  nf4::cuda::pdl_launch_dependents<Arch>();
  const CachePolicy once = nf4::cuda::evict_first<Arch>();
  const auto *in = static_cast<const uint4 *>(args.in);
  const int64_t first = first_vector<Loads>();
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < Loads; ++i) {
    if (first + i * 32 >= args.in_vectors) continue;
    const uint4 v = nf4::cuda::load_once<Arch>(in + first + i * 32, once);
    all |= v.x | v.y | v.z | v.w;
  }
  // Never so for random data, but the compiler cannot know.
  if (all == 0) *static_cast<uint32_t *>(args.out) = all;
}

template <int Stores>
__global__ void __launch_bounds__(kThreads) write(const __grid_constant__ Traffic args) {
  nf4::cuda::pdl_wait<Arch>();
  nf4::cuda::pdl_launch_dependents<Arch>();
  const CachePolicy policy = output_policy(args);
  const int64_t first = first_vector<Stores>();
#pragma unroll
  for (int i = 0; i < Stores; ++i)
    if (first + i * 32 < args.in_vectors)
      nf4::cuda::store_once<Arch>(static_cast<uint4 *>(args.out) + first + i * 32,
                                  vary(static_cast<uint32_t>(first) * 2654435761u + i), policy);
}

// `kernel` over args.in_vectors, of which a thread takes `loads`.
int run(void (*kernel)(Traffic), int loads, const Traffic &args, int pdl, cudaStream_t stream) {
  if (pdl != 0 && !nf4_bench_has_pdl()) return cudaErrorNotSupported;
  const int64_t blocks = nf4::ceil_divide(args.in_vectors, int64_t{kThreads} * loads);
  return nf4::cuda::launch(
      {reinterpret_cast<const void *>(kernel), blocks, kThreads, pdl != 0, stream}, args);
}

}  // namespace

// Variants: two or four loads in flight a thread; stores normal, evict-first, or evict-first
// with a prefetch of the input.
int nf4_bench_dequant_traffic_variants(void) { return 6; }

int nf4_bench_dequant_traffic(int variant, const void *packed, int64_t words, const void *scales,
                              int64_t scale_bytes, void *out, int stores, int pdl,
                              nf4_stream stream) {
  Traffic args{packed, static_cast<const uint32_t *>(scales), out, words, scale_bytes / 4, 0,
               false};
  args.evict_first = variant % 3 != 0;
  args.prefetch_blocks = variant % 3 == 2 ? 2048 : 0;
  if (variant / 3 == 0) return run(stores == 1 ? expand<2, 1> : expand<2, 2>, 2, args, pdl, stream);
  return run(stores == 1 ? expand<4, 1> : expand<4, 2>, 4, args, pdl, stream);
}

int nf4_bench_quantize_traffic_variants(void) { return 3; }

int nf4_bench_quantize_traffic(int variant, const void *in, int64_t in_bytes, void *out,
                               int64_t out_bytes, int pdl, nf4_stream stream) {
  const Traffic args{in, nullptr, out, in_bytes / 16, 0, 0, false};
  const bool halve = in_bytes / 8 == out_bytes;
  if (variant == 0) return run(halve ? shrink<2, true> : shrink<2, false>, 2, args, pdl, stream);
  if (variant == 1) return run(halve ? shrink<4, true> : shrink<4, false>, 4, args, pdl, stream);
  return run(halve ? shrink<8, true> : shrink<8, false>, 8, args, pdl, stream);
}

int nf4_bench_read_variants(void) { return 2; }

int nf4_bench_read(int variant, const void *in, int64_t bytes, void *sink, int pdl,
                   nf4_stream stream) {
  const Traffic args{in, nullptr, sink, bytes / 16, 0, 0, false};
  if (variant == 0) return run(read<4>, 4, args, pdl, stream);
  return run(read<8>, 8, args, pdl, stream);
}

// Variants: two or four stores a thread, normal or evict-first.
int nf4_bench_write_variants(void) { return 4; }

int nf4_bench_write(int variant, void *out, int64_t bytes, int pdl, nf4_stream stream) {
  const Traffic args{nullptr, nullptr, out, bytes / 16, 0, 0, variant % 2 == 1};
  if (variant / 2 == 0) return run(write<2>, 2, args, pdl, stream);
  return run(write<4>, 4, args, pdl, stream);
}
