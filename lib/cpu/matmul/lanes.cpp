// Matmul for more than a few rows of x in bf16: a lane is a row of the weight.
//
// Codes of a block of rows and columns are transposed, so that a vector has a word of each of 16
// rows; the kernel looks them up, multiplies them with x, and applies the scales to the sums of a
// block of quantization. Per 128 weights 11 instructions to transpose, 8 to look up for up to 12
// rows of x, and 4 vdpbf16ps for each row of x, which bound it. docs/design/cpu.md has the rates.
#include <algorithm>

#include "cpu/matmul/parts.hpp"
#include "cpu/weight/scales.hpp"

namespace nf4::cpu {
namespace {

// Rows of x whose sums are kept at once.
constexpr int64_t kGroupM = 64;
constexpr int64_t kLanes = 16;
constexpr int64_t kMaxScales = kLaneColumns / kMinBlocksize;

class LaneMultiplier {
 public:
  LaneMultiplier(const MatmulKernels &kernels, const MatmulProblem &problem,
                 const RoundedCodebook &codebook)
      : kernels_(kernels), problem_(problem), weight_(problem.weight), codebook_(codebook) {
    while (per_scale_ < kLaneColumns && weight_.blocksize() % (2 * per_scale_) == 0 &&
           weight_.cols % (2 * per_scale_) == 0)
      per_scale_ *= 2;
  }

  // All of n for some rows of x, which stay in the L2 cache.
  void operator()(RowRange n) {
    const int64_t groups = ceil_divide(problem_.m, kGroupM);
    for (int64_t group = 0; group < groups; ++group) {
      const RowRange m{problem_.m * group / groups, problem_.m * (group + 1) / groups};
      for (int64_t i = n.begin; i < n.end; i += kLaneBlockN)
        multiply({i, std::min(n.end, i + kLaneBlockN)}, m);
    }
  }

 private:
  void multiply(RowRange n, RowRange m) {
    alignas(64) float sums[kGroupM * kLaneBlockN];
    const int64_t count = (m.end - m.begin) * kLaneBlockN;
    std::fill_n(sums, count, 0.0f);
    for (int64_t k = 0; k < weight_.cols; k += kLaneColumns) {
      const int64_t elements = std::min(kLaneColumns, weight_.cols - k);
      for (int64_t i = n.begin; i < n.end; i += kLanes)
        load({i, std::min(n.end, i + kLanes)}, i - n.begin, k, elements);
      add_products(n, m, k, elements, sums);
    }
    for (int64_t i = 0; i < count; ++i) sums[i] *= codebook_.unit;
    const Sums done{n, m, sums, kLaneBlockN};
    add_adapter(kernels_, problem_, done);
    store_sums(problem_, done);
  }

  // The codes and scales of a vector of rows to lane `at` and those after it.
  void load(RowRange n, int64_t at, int64_t k, int64_t elements) {
    const int64_t row_bytes = weight_.cols / 2;
    const int rows = static_cast<int>(n.end - n.begin);
    kernels_.transpose_codes(weight_.packed + n.begin * row_bytes + k / 2, row_bytes, rows,
                             elements / kCodesPerWord, codes_ + at);
    const int64_t count = elements / per_scale_;
    for (int64_t row = 0; row < rows; ++row)
      read_scales((n.begin + row) * weight_.cols + k, count, row_scales_ + row * kMaxScales);
    kernels_.transpose_scales(row_scales_, kMaxScales, count, scales_ + at);
  }

  void read_scales(int64_t first_element, int64_t count, float *scales) const {
    const int64_t first = first_element >> weight_.blocksize_log2;
    if (per_scale_ == weight_.blocksize())
      return nf4::cpu::read_scales(weight_, first, count, scales, kernels_.nested_scales);
    float by_block[kMaxScales + 1];
    const int64_t last = (first_element + count * per_scale_ - 1) >> weight_.blocksize_log2;
    nf4::cpu::read_scales(weight_, first, last - first + 1, by_block, kernels_.nested_scales);
    for (int64_t i = 0; i < count; ++i)
      scales[i] = by_block[((first_element + i * per_scale_) >> weight_.blocksize_log2) - first];
  }

  void add_products(RowRange n, RowRange m, int64_t k, int64_t elements, float *sums) {
    const int64_t count = m.end - m.begin, groups = ceil_divide(count, kMaxLaneM);
    const bool last = k + elements == weight_.cols;
    const int64_t next =
        last ? (n.begin + kLaneBlockN) * weight_.cols : n.begin * weight_.cols + k + elements;
    for (int64_t group = 0; group < groups; ++group) {
      const RowRange some{count * group / groups, count * (group + 1) / groups};
      for (int64_t i = some.begin; i < some.end; ++i)
        std::copy_n(row_of_x(m.begin + i) + k, elements, x_ + (i - some.begin) * kLaneColumns);
      kernels_.lanes({codebook_.entries, codes_, scales_, per_scale_, x_, elements,
                      static_cast<int>(ceil_divide(n.end - n.begin, kLanes) * kLanes),
                      static_cast<int>(some.end - some.begin), sums + some.begin * kLaneBlockN,
                      group == 0 ? weight_.packed + next / 2 : nullptr, weight_.cols / 2});
    }
  }

  const uint16_t *row_of_x(int64_t m) const {
    return reinterpret_cast<const uint16_t *>(address_of_x(problem_, m, 0));
  }

  const MatmulKernels &kernels_;
  const MatmulProblem &problem_;
  const Weight &weight_;
  const RoundedCodebook &codebook_;
  int64_t per_scale_ = kMinBlocksize;  // elements, of which a block and every row have whole ones
  alignas(64) uint32_t codes_[kLaneColumns / kCodesPerWord * kLaneBlockN];
  float row_scales_[kLanes * kMaxScales] = {};
  alignas(64) float scales_[kMaxScales * kLaneBlockN];
  alignas(64) uint16_t x_[kMaxLaneM * kLaneColumns];
};

}  // namespace

void matmul_lanes(const MatmulKernels &kernels, const MatmulProblem &problem,
                  const RoundedCodebook &bf16_codebook, RowRange n) {
  LaneMultiplier(kernels, problem, bf16_codebook)(n);
}

}  // namespace nf4::cpu
