// Dequantize by vector kernels: what surrounds them. Reads the scales, pads the tail of a weight,
// and chooses how the output is stored. Compiled for the baseline of the target.
//
// Outputs larger than the caches are produced in a small buffer and copied from there by
// nontemporal stores, which spares reading the lines that they overwrite. Pages that the system has
// yet to provide are written through the caches: they are zeroed there at the first touch.
// docs/design/cpu.md has the measurements.
#include "cpu/dequant/dequant.hpp"

#include <sys/mman.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <algorithm>
#include <cstring>

#include "cpu/cache.hpp"
#include "cpu/weight/scales.hpp"

namespace nf4::cpu {
namespace {

// Of output, dequantized at once: straight to its place, and by way of the buffer.
constexpr int64_t kChunkBytes = 16384;
constexpr int64_t kStagedBytes = 4096;
constexpr int64_t kMaxScales = kChunkBytes / 2 / kMinBlocksize;
constexpr int64_t kLineBytes = 64;

// False where the system has yet to provide the page of an address.
bool is_resident(const char *address) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  unsigned char resident = 1;
  mincore(reinterpret_cast<void *>(reinterpret_cast<uintptr_t>(address) / page * page), 1,
          &resident);
  return resident & 1;
}

class Dequantizer {
 public:
  Dequantizer(const DequantKernels &kernels, const DequantProblem &problem)
      : kernels_(kernels),
        weight_(problem.weight),
        kernel_(kernels.dequant[problem.dtype - 1]),
        out_(static_cast<char *>(problem.out)),
        element_bytes_(element_bytes(problem.dtype)) {
    std::transform(codebook(weight_), codebook(weight_) + kCodebookSize, codebook_, canonical);
  }

  void operator()(BlockRange blocks) {
    const int64_t end = std::min(blocks.end * weight_.blocksize(), weight_.elements);
    const int64_t begin = blocks.begin * weight_.blocksize();
    nontemporal_ = weight_.elements * element_bytes_ > kCachesOfOutput * last_level_cache_bytes() &&
                   is_resident(out_ + (begin + end) / 2 * element_bytes_);
    const int64_t chunk = (nontemporal_ ? kStagedBytes : kChunkBytes) / element_bytes_;
    for (int64_t i = begin; i < end; i += chunk) dequant_chunk(i, std::min(chunk, end - i));
    // Nontemporal stores are not ordered with others by themselves.
    if (nontemporal_) _mm_sfence();
  }

 private:
  void dequant_chunk(int64_t first, int64_t elements) {
    const int64_t first_block = first >> weight_.blocksize_log2;
    const int64_t last_block = (first + elements - 1) >> weight_.blocksize_log2;
    const int64_t count = last_block - first_block + 1;
    read_scales(weight_, first_block, count, scales_);
    std::transform(scales_, scales_ + count, scales_, canonical);

    char *out = out_ + first * element_bytes_;
    const int64_t tail = elements % kKernelStep;
    DequantArgs args{codebook_,       weight_.packed + first / 2, scales_,
                     elements - tail, weight_.blocksize(),        nontemporal_ ? stage_ : out};
    kernel_(args);
    if (nontemporal_) store_staged(out, args.elements * element_bytes_);
    if (tail == 0) return;
    args.packed += args.elements / 2;
    args.scales += last_block - first_block;
    args.elements = tail;
    args.out = out + (elements - tail) * element_bytes_;
    dequant_tail(args);
  }

  // The last elements of the weight, fewer than a step: through padded copies.
  void dequant_tail(DequantArgs args) const {
    uint8_t packed[kKernelStep / 2] = {};
    char values[kKernelStep * sizeof(float)];
    std::memcpy(packed, args.packed, (args.elements + 1) / 2);
    const int64_t bytes = args.elements * element_bytes_;
    void *out = args.out;
    args.packed = packed;
    args.elements = kKernelStep;
    args.out = values;
    kernel_(args);
    std::memcpy(out, values, bytes);
  }

  void store_staged(char *to, int64_t bytes) const {
    const auto misaligned = reinterpret_cast<uintptr_t>(to) % kLineBytes;
    const int64_t head = std::min<int64_t>(bytes, misaligned == 0 ? 0 : kLineBytes - misaligned);
    const int64_t lines = (bytes - head) / kLineBytes;
    const int64_t whole_end = head + lines * kLineBytes;
    std::memcpy(to, stage_, head);
    kernels_.store_nontemporal(to + head, stage_ + head, lines);
    std::memcpy(to + whole_end, stage_ + whole_end, bytes - whole_end);
  }

  const DequantKernels &kernels_;
  const Weight &weight_;
  void (*const kernel_)(const DequantArgs &);
  char *const out_;
  const int64_t element_bytes_;
  bool nontemporal_ = false;
  float codebook_[kCodebookSize];
  float scales_[kMaxScales];
  alignas(kLineBytes) char stage_[kStagedBytes];
};

}  // namespace

void dequant_vector(const DequantKernels &kernels, const DequantProblem &problem,
                    BlockRange blocks) {
  Dequantizer(kernels, problem)(blocks);
}

}  // namespace nf4::cpu
