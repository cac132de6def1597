// What surrounds a vector kernel: the scales, the padding of tails, the way to memory.
// Compiled for the baseline of the target.
//
// Outputs that the caches cannot hold are made in a small buffer and copied from there past
// the caches, which spares reading the lines that they overwrite. Where that wins depends on
// the machine: two cores of a Zen 4 (32 MiB of third-level cache for each chiplet), bf16, in
// milliseconds past and through the caches, the cores on two chiplets and on one:
//   32 MiB 0.71 0.67, 1.29 0.87     64 MiB 1.57 1.88, 2.57 2.20
//   96 MiB 2.22 2.88, 3.79 3.75    112 MiB 2.34 3.10, 4.35 4.39
// Memory that the kernel has yet to provide is written through the caches in any case: it
// is zeroed there at the first touch, and going past them would send it to memory twice
// (112 MiB 8.3 past, 6.8 through). A buffer of 16 KiB was 10 % slower than one of 4 KiB, stores
// of 16 bytes 25 % slower than of 64; leaving the first 16 or 32 MiB of a large output in the
// caches gained nothing.
#include "cpu/vector.hpp"

#include <sys/mman.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/encode.hpp"
#include "cpu/cache.hpp"
#include "cpu/scales.hpp"

namespace nf4::cpu {
namespace {

// Of output, dequantized at once: straight to its place, and by way of a buffer.
constexpr int64_t kPieceBytes = 16384;
constexpr int64_t kStagedBytes = 4096;
constexpr int64_t kMaxScales = kPieceBytes / 2 / kMinBlocksize;
constexpr int64_t kLineBytes = 64;

// A NaN as DequantRun wants it.
float canonical(float x) { return std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : x; }

// False where the kernel has yet to provide the page of an address.
bool is_resident(const char *address) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  unsigned char resident = 1;
  mincore(reinterpret_cast<void *>(reinterpret_cast<uintptr_t>(address) / page * page), 1,
          &resident);
  return resident & 1;
}

class Dequantizer {
 public:
  Dequantizer(const KernelSet &kernels, const DequantProblem &problem)
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
    streams_ = weight_.elements * element_bytes_ > kCachesOfOutput * last_level_cache_bytes() &&
               is_resident(out_ + (begin + end) / 2 * element_bytes_);
    const int64_t piece = (streams_ ? kStagedBytes : kPieceBytes) / element_bytes_;
    for (int64_t i = begin; i < end; i += piece) dequant_piece(i, std::min(piece, end - i));
    // Stores past the caches are ordered with no others by themselves.
    if (streams_) _mm_sfence();
  }

 private:
  void dequant_piece(int64_t first, int64_t elements) {
    const int64_t first_block = first >> weight_.blocksize_log2;
    const int64_t last_block = (first + elements - 1) >> weight_.blocksize_log2;
    for (int64_t block = first_block; block <= last_block; ++block)
      scales_[block - first_block] = canonical(block_scale(weight_, block));

    char *out = out_ + first * element_bytes_;
    const int64_t tail = elements % kKernelStep;
    DequantRun run{codebook_,       weight_.packed + first / 2, scales_,
                   elements - tail, weight_.blocksize(),        streams_ ? stage_ : out};
    kernel_(run);
    if (streams_) stream(out, run.elements * element_bytes_);
    if (tail == 0) return;
    run.packed += run.elements / 2;
    run.scales += last_block - first_block;
    run.elements = tail;
    run.out = out + (elements - tail) * element_bytes_;
    dequant_tail(run);
  }

  // The last elements of the weight, fewer than a step: through padded copies.
  void dequant_tail(DequantRun run) const {
    uint8_t packed[kKernelStep / 2] = {};
    char values[kKernelStep * sizeof(float)];
    std::memcpy(packed, run.packed, (run.elements + 1) / 2);
    const int64_t bytes = run.elements * element_bytes_;
    void *out = run.out;
    run.packed = packed;
    run.elements = kKernelStep;
    run.out = values;
    kernel_(run);
    std::memcpy(out, values, bytes);
  }

  void stream(char *to, int64_t bytes) const {
    const auto misaligned = reinterpret_cast<uintptr_t>(to) % kLineBytes;
    const int64_t head = std::min<int64_t>(bytes, misaligned == 0 ? 0 : kLineBytes - misaligned);
    const int64_t lines = (bytes - head) / kLineBytes;
    const int64_t streamed_end = head + lines * kLineBytes;
    std::memcpy(to, stage_, head);
    kernels_.stream(to + head, stage_ + head, lines);
    std::memcpy(to + streamed_end, stage_ + streamed_end, bytes - streamed_end);
  }

  const KernelSet &kernels_;
  const Weight &weight_;
  void (*const kernel_)(const DequantRun &);
  char *const out_;
  const int64_t element_bytes_;
  bool streams_ = false;
  float codebook_[kCodebookSize];
  float scales_[kMaxScales];
  alignas(kLineBytes) char stage_[kStagedBytes];
};

// False if a cell would hold two thresholds. All is compared as 15 x, which is exact in
// binary64. A threshold that is NaN or beyond [-1, 1] is in no cell.
bool make_cells(const Quantizer &quantizer, Cells &cells) {
  cells = {};
  for (int cell = -Cells::kPerUnit; cell <= Cells::kPerUnit; ++cell) {
    int below = 0;
    int inside = 0;
    float threshold = kLargestFloat;
    for (const float each : quantizer.thresholds) {
      const double scaled = double{each} * Cells::kPerUnit;
      below += scaled < cell - 0.5;
      if (!(scaled >= cell - 0.5 && scaled <= cell + 0.5)) continue;
      if (inside > 0 && each != threshold) return false;
      threshold = each;
      ++inside;
    }
    const int entry = cell & (Cells::kEntries - 1);
    cells.thresholds[entry] = threshold;
    cells.codes[entry] = (quantizer.codes[below + inside] << 8 | quantizer.codes[below]) * 0x11u;
  }
  return true;
}

// The last block of a weight where it is partial: through copies padded with zeros, which
// change no scale.
void quantize_partial(void (*kernel)(const QuantizeRun &), QuantizeRun run, int64_t elements,
                      int64_t bytes_per_element) {
  char in[kMaxBlocksize * sizeof(float)] = {};
  uint8_t packed[kMaxBlocksize / 2];
  std::memcpy(in, run.in, elements * bytes_per_element);
  uint8_t *out = run.packed;
  run.in = in;
  run.packed = packed;
  run.blocks = 1;
  run.blocksize = (elements + kKernelStep - 1) / kKernelStep * kKernelStep;
  kernel(run);
  if (elements % 2 == 1) packed[elements / 2] &= 0xf0;
  std::memcpy(out, packed, (elements + 1) / 2);
}

}  // namespace

void dequant_vector(const KernelSet &kernels, const DequantProblem &problem, BlockRange blocks) {
  Dequantizer(kernels, problem)(blocks);
}

void quantize_vector(const KernelSet &kernels, const QuantizeProblem &problem, float *absmax,
                     BlockRange blocks) {
  const Weight &weight = problem.weight;
  const Quantizer quantizer = make_quantizer(codebook(weight));
  Cells cells;
  const bool has_cells = make_cells(quantizer, cells);
  const auto kernel = kernels.quantize[problem.dtype - 1];
  const int64_t bytes = element_bytes(problem.dtype);
  const int64_t whole_end = std::min(blocks.end, weight.elements >> weight.blocksize_log2);
  const auto run_from = [&](int64_t block, int64_t count) {
    const int64_t first = block * weight.blocksize();
    return QuantizeRun{quantizer.thresholds,
                       quantizer.codes,
                       has_cells ? &cells : nullptr,
                       static_cast<const char *>(problem.in) + first * bytes,
                       count,
                       weight.blocksize(),
                       absmax + block,
                       weight.packed + first / 2};
  };
  kernel(run_from(blocks.begin, whole_end - blocks.begin));
  if (whole_end < blocks.end)
    quantize_partial(kernel, run_from(whole_end, 1), weight.elements % weight.blocksize(), bytes);
}

}  // namespace nf4::cpu
