// The limit that kernels are measured against: streams that move the same bytes and do
// nothing else, with the launch shapes and cache hints that dequantize may choose from. A
// figure uses the fastest of them. Test code: a small library of its own, for ctypes.
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/memory.cuh"

namespace {

using nf4::cuda::CachePolicy;

// What the GPU that this is compiled for has to offer.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
using Arch = nf4::cuda::Sm90;
#elif __CUDA_ARCH__ >= 800
using Arch = nf4::cuda::Sm80;
#else
using Arch = nf4::cuda::Sm75;
#endif

struct Stream {
  const uint32_t *in;  // read once: in_words, of which each thread takes `Loads`
  uint4 *out;          // written once
  int64_t in_words;
  int prefetch_blocks;
  bool evict_first;
};

constexpr int kThreads = 256;

// Each 4-byte word read becomes Stores 16-byte vectors written: 1 for 16-bit dequantize,
// 2 for 32-bit. A warp's accesses are contiguous.
template <int Loads, int Stores>
__global__ void __launch_bounds__(kThreads) stream(const __grid_constant__ Stream args) {
  const int64_t block = int64_t{blockIdx.x} * kThreads * Loads;
  const int warp = threadIdx.x / 32 * 32 * Loads;
  const int lane = threadIdx.x % 32;
  const CachePolicy first = nf4::cuda::evict_first<Arch>();
  const CachePolicy policy = args.evict_first ? first : nf4::cuda::evict_normal<Arch>();
  uint32_t words[Loads];
#pragma unroll
  for (int i = 0; i < Loads; ++i) {
    const int64_t word = block + warp + i * 32 + lane;
    words[i] = word < args.in_words ? nf4::cuda::load_streamed<Arch>(args.in + word, first) : 0;
  }
  if constexpr (Arch::kBulkPrefetch) {
    const int64_t ahead = int64_t{blockIdx.x} + args.prefetch_blocks;
    if (args.prefetch_blocks != 0 && threadIdx.x == 0 && ahead + 1 < gridDim.x)
      nf4::cuda::prefetch_l2<Arch>(args.in + ahead * kThreads * Loads, kThreads * Loads * 4);
  }
#pragma unroll
  for (int i = 0; i < Loads; ++i)
#pragma unroll
    for (int j = 0; j < Stores; ++j) {
      const int64_t word = block + warp + i * 32;
      if (word + lane < args.in_words)
        nf4::cuda::store_streamed<Arch>(
            args.out + word * Stores + j * 32 + lane,
            {words[i], words[i] ^ 0x11u, words[i] ^ 0x22u, words[i] ^ 0x33u}, policy);
    }
}

// Reads everything once and writes next to nothing, in 16-byte loads.
__global__ void __launch_bounds__(kThreads)
    read_once(const uint4 *in, int64_t vectors, uint32_t *sink) {
  const CachePolicy first = nf4::cuda::evict_first<Arch>();
  const int64_t start = int64_t{blockIdx.x} * kThreads * 4 + threadIdx.x;
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (start + i * kThreads >= vectors) continue;
    const uint4 v = nf4::cuda::load_streamed<Arch>(in + start + i * kThreads, first);
    all |= v.x | v.y | v.z | v.w;
  }
  // Never so for random data, but the compiler cannot know.
  if (all == 0) *sink = all;
}

template <int Loads>
void launch(const Stream &args, int stores, cudaStream_t cuda_stream) {
  const int64_t per_block = kThreads * Loads;
  const auto blocks = static_cast<unsigned>((args.in_words + per_block - 1) / per_block);
  if (stores == 1)
    stream<Loads, 1><<<blocks, kThreads, 0, cuda_stream>>>(args);
  else
    stream<Loads, 2><<<blocks, kThreads, 0, cuda_stream>>>(args);
}

}  // namespace

// Variants 0..5: two or four loads in flight a thread; stores evict-first or normal;
// prefetch or none. `in` must hold in_words words, `out` in_words * stores vectors of 16
// bytes. Returns the CUDA error.
extern "C" int nf4_bench_stream(int variant, const void *in, int64_t in_words, void *out,
                                int stores, cudaStream_t cuda_stream) {
  Stream args{static_cast<const uint32_t *>(in), static_cast<uint4 *>(out), in_words, 0, false};
  args.evict_first = variant % 3 != 0;
  args.prefetch_blocks = variant % 3 == 2 ? 2048 : 0;
  if (variant / 3 == 0)
    launch<2>(args, stores, cuda_stream);
  else
    launch<4>(args, stores, cuda_stream);
  return cudaGetLastError();
}

// Reads `vectors` vectors of 16 bytes; `sink` is 4 bytes of scratch.
extern "C" int nf4_bench_read(const void *in, int64_t vectors, void *sink,
                              cudaStream_t cuda_stream) {
  const auto blocks = static_cast<unsigned>((vectors + kThreads * 4 - 1) / (kThreads * 4));
  read_once<<<blocks, kThreads, 0, cuda_stream>>>(static_cast<const uint4 *>(in), vectors,
                                                  static_cast<uint32_t *>(sink));
  return cudaGetLastError();
}
