// Quantize with vector kernels, the part around the kernels: prepares the codebook for their
// search, and pads the last block of a weight.
#include "cpu/quantize/quantize.hpp"

#include <algorithm>
#include <cstring>

#include "core/encode.hpp"
#include "cpu/weight/scales.hpp"

namespace nf4::cpu {
namespace {

// Returns false if a cell would hold two thresholds. Everything is compared as 15 x, which is exact
// in binary64. A threshold that is NaN or beyond [-1, 1] is in no cell.
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

// Quantizes the last block of a weight if it is partial, through copies padded with zeros, which
// change no scale.
void quantize_partial(void (*kernel)(const QuantizeArgs &), QuantizeArgs args, int64_t elements,
                      int64_t bytes_per_element) {
  char in[kMaxBlocksize * sizeof(float)] = {};
  uint8_t packed[kMaxBlocksize / 2];
  std::memcpy(in, args.in, elements * bytes_per_element);
  uint8_t *out = args.packed;
  args.in = in;
  args.packed = packed;
  args.blocks = 1;
  args.blocksize = (elements + kKernelStep - 1) / kKernelStep * kKernelStep;
  kernel(args);
  if (elements % 2 == 1) packed[elements / 2] &= 0xf0;
  std::memcpy(out, packed, (elements + 1) / 2);
}

}  // namespace

void quantize_vector(const QuantizeKernels &kernels, const QuantizeProblem &problem, float *absmax,
                     BlockRange blocks) {
  const Weight &weight = problem.weight;
  const Quantizer quantizer = make_quantizer(codebook(weight));
  Cells cells;
  const bool has_cells = make_cells(quantizer, cells);
  const auto kernel = kernels.quantize[problem.dtype - 1];
  const int64_t bytes = element_bytes(problem.dtype);
  const int64_t whole_end = std::min(blocks.end, weight.elements >> weight.blocksize_log2);
  const auto args_from = [&](int64_t block, int64_t count) {
    const int64_t first = block * weight.blocksize();
    return QuantizeArgs{quantizer.thresholds,
                        quantizer.codes,
                        has_cells ? &cells : nullptr,
                        static_cast<const char *>(problem.in) + first * bytes,
                        count,
                        weight.blocksize(),
                        absmax + block,
                        weight.packed + first / 2};
  };
  kernel(args_from(blocks.begin, whole_end - blocks.begin));
  if (whole_end < blocks.end)
    quantize_partial(kernel, args_from(whole_end, 1), weight.elements % weight.blocksize(), bytes);
}

}  // namespace nf4::cpu
