// Dequantize with vector kernels, the part around the kernels: reads the scales, and pads the tail
// of a weight. This file is compiled for the baseline of the target.
#include "cpu/dequant/dequant.hpp"

#include <algorithm>
#include <cstring>

#include "cpu/dequant/codes.hpp"
#include "cpu/dequant/output.hpp"
#include "cpu/weight/scales.hpp"

namespace nf4::cpu {
namespace {

class Dequantizer {
 public:
  Dequantizer(const DequantKernels &kernels, const DequantProblem &problem)
      : weight_(problem.weight),
        kernel_(kernels, problem.weight, problem.dtype),
        out_(static_cast<char *>(problem.out)),
        element_bytes_(element_bytes(problem.dtype)),
        output_(kernels, problem.out, problem.weight.elements * element_bytes_) {}

  void operator()(BlockRange blocks) {
    const int64_t end = std::min(blocks.end * weight_.blocksize(), weight_.elements);
    const int64_t begin = blocks.begin * weight_.blocksize();
    output_.begin(begin * element_bytes_, end * element_bytes_);
    const int64_t chunk = output_.chunk_bytes() / element_bytes_;
    for (int64_t i = begin; i < end; i += chunk) dequant_chunk(i, std::min(chunk, end - i));
    output_.end();
  }

 private:
  void dequant_chunk(int64_t first, int64_t elements) {
    const int64_t first_block = first >> weight_.blocksize_log2;
    const int64_t last_block = (first + elements - 1) >> weight_.blocksize_log2;
    const int64_t count = last_block - first_block + 1;
    read_scales(weight_, first_block, count, scales_);
    std::transform(scales_, scales_ + count, scales_, canonical);
    scales_[count] = 0;  // the second block of a step that ends with the weight

    const int64_t offset = first * element_bytes_;
    const int64_t tail = elements % kKernelStep;
    char *const made = output_.place(offset);
    DequantArgs args{nullptr,         weight_.packed + first / 2, scales_,
                     elements - tail, weight_.blocksize(),        made};
    kernel_(args);
    output_.store(made, offset, args.elements * element_bytes_);
    if (tail == 0) return;
    args.packed += args.elements / 2;
    args.scales += last_block - first_block;
    args.out = out_ + offset + args.elements * element_bytes_;
    args.elements = tail;
    dequant_tail(args);
  }

  // Dequantizes the last elements of the weight, fewer than a step, through padded copies.
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

  const Weight &weight_;
  const CodesDequantizer kernel_;
  char *const out_;
  const int64_t element_bytes_;
  float scales_[CodesDequantizer::max_scales(DequantOutput::kChunkBytes / 2)];
  DequantOutput output_;
};

}  // namespace

void dequant_vector(const DequantKernels &kernels, const DequantProblem &problem,
                    BlockRange blocks) {
  Dequantizer(kernels, problem)(blocks);
}

}  // namespace nf4::cpu
