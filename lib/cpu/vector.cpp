// What surrounds a vector kernel: the scales, the padding of tails, the way to memory.
// Compiled for the baseline of the target.
//
// Large outputs are made in a small buffer and copied from there past the caches, which
// spares reading the lines that they overwrite. On two cores of a Zen 4 with 32 MiB of
// third-level cache, milliseconds with and without:
//   2048 x 2048 fp32 (16 MiB) 0.38 0.22    4096 x 4096 bf16 (32 MiB) 0.72 1.23
//   2896 x 2896 fp32 (32 MiB) 0.68 0.84    14336 x 4096 bf16 (112 MiB) 2.3 3.8
// A buffer of 16 KiB was 10 % slower than one of 4 KiB, stores of 16 bytes 25 % slower than
// of 64.
#include "cpu/vector.hpp"

#include <xmmintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/encode.hpp"
#include "cpu/scales.hpp"

namespace nf4::cpu {
namespace {

constexpr int64_t kPieceBytes = 4096;
constexpr int64_t kMaxScales = kPieceBytes / 2 / kMinBlocksize;
constexpr int64_t kLineBytes = 64;
// Outputs from this size on, about a third-level cache, go past the caches.
constexpr int64_t kStreamedBytes = int64_t{32} << 20;

// A NaN as DequantRun wants it.
float canonical(float x) { return std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : x; }

class Dequantizer {
 public:
  Dequantizer(const KernelSet &kernels, const DequantProblem &problem)
      : kernels_(kernels),
        weight_(problem.weight),
        kernel_(kernels.dequant[problem.dtype - 1]),
        out_(static_cast<char *>(problem.out)),
        element_bytes_(element_bytes(problem.dtype)),
        streams_(weight_.elements * element_bytes_ >= kStreamedBytes) {
    std::transform(codebook(weight_), codebook(weight_) + kCodebookSize, codebook_, canonical);
  }

  void operator()(BlockRange blocks) {
    const int64_t piece = kPieceBytes / element_bytes_;
    const int64_t end = std::min(blocks.end * weight_.blocksize(), weight_.elements);
    for (int64_t i = blocks.begin * weight_.blocksize(); i < end; i += piece)
      dequant_piece(i, std::min(piece, end - i));
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
  const bool streams_;
  float codebook_[kCodebookSize];
  float scales_[kMaxScales];
  alignas(kLineBytes) char stage_[kPieceBytes];
};

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
  const auto kernel = kernels.quantize[problem.dtype - 1];
  const int64_t bytes = element_bytes(problem.dtype);
  const int64_t whole_end = std::min(blocks.end, weight.elements >> weight.blocksize_log2);
  const auto run_from = [&](int64_t block, int64_t count) {
    const int64_t first = block * weight.blocksize();
    return QuantizeRun{quantizer.thresholds,
                       quantizer.codes,
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
