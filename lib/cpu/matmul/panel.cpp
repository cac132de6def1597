// Matmul for many rows of x: a panel of rows of the weight is dequantized into the caches and
// multiplied with all rows of x.
//
// On a Zen 4 64 weights take 3.3 ns to dequantize, of which 1.2 are the scales, and 0.58 ns for
// each row of x in bf16 (0.54 at one vdpbf16ps a cycle). docs/design/cpu.md has what was tried.
#include <algorithm>
#include <cstring>

#include "cpu/dequant/range.hpp"
#include "cpu/matmul/parts.hpp"

namespace nf4::cpu {
namespace {

constexpr int64_t kPanelBytes = 65536;
constexpr int64_t kMaxPanelN = 16;
// Of x, converted.
constexpr int64_t kConvertedBytes = 4096;
constexpr int64_t kMaxTileM = 6;
// Rows of x for which a panel serves.
constexpr int64_t kPanelM = 96;

class PanelMultiplier {
 public:
  PanelMultiplier(const DequantKernels &dequant, const MatmulKernels &kernels,
                  const MatmulProblem &problem)
      : kernels_(kernels),
        problem_(problem),
        weight_(problem.weight),
        element_bytes_(element_bytes(kernels.dtype)),
        row_bytes_(kernels.tile_elements * element_bytes_),
        panel_n_(std::min(kMaxPanelN, kPanelBytes / row_bytes_)),
        dequant_(dequant, problem.weight, kernels.dtype),
        convert_{kernels.convert[problem.dtype - 1], kKernelStep, element_bytes(problem.dtype),
                 element_bytes_} {}

  // All of n for some rows of x, which stay in the L2 cache.
  void operator()(RowRange n) {
    const int64_t groups = ceil_divide(problem_.m, kPanelM);
    for (int64_t group = 0; group < groups; ++group) {
      const RowRange m{problem_.m * group / groups, problem_.m * (group + 1) / groups};
      for (int64_t i = n.begin; i < n.end; i += panel_n_)
        multiply({i, std::min(n.end, i + panel_n_)}, m);
    }
  }

 private:
  void multiply(RowRange n, RowRange m) {
    float sums[kPanelM * kMaxPanelN] = {};
    for (int64_t k = 0; k < weight_.cols;) {
      const int64_t elements = part_of_row(weight_.cols - k);
      for (int64_t i = n.begin; i < n.end; ++i) {
        prefetch((i + panel_n_) * weight_.cols + k, elements);
        dequant_(i * weight_.cols + k, elements, panel_ + (i - n.begin) * row_bytes_);
      }
      add_products(static_cast<int>(n.end - n.begin), m, k, elements, sums);
      k += elements;
    }
    store_sums(problem_, {n, m, sums, kMaxPanelN});
  }

  // The codes of the next panel.
  void prefetch(int64_t first, int64_t elements) const {
    const uint8_t *packed = weight_.packed + first / 2;
    for (int64_t i = 0; i < elements / 2; i += 64) __builtin_prefetch(packed + i, 0, 2);
  }

  // Whole steps as long as there are any.
  int64_t part_of_row(int64_t left) const {
    if (left < kKernelStep) return left;
    return std::min<int64_t>(kernels_.tile_elements, left - left % kKernelStep);
  }

  void add_products(int n, RowRange m, int64_t k, int64_t elements, float *sums) {
    const bool in_place = convert_.convert == nullptr && elements % kKernelStep == 0;
    for (int64_t i = m.begin; i < m.end; i += kernels_.tile_m) {
      const int count = static_cast<int>(std::min<int64_t>(kernels_.tile_m, m.end - i));
      if (!in_place) convert(i, count, k, elements);
      kernels_.tile({panel_, kernels_.tile_elements, in_place ? x_at(i, k) : x_,
                     in_place ? problem_.x_stride : kConvertedBytes / element_bytes_,
                     to_steps(elements), n, count, sums + (i - m.begin) * kMaxPanelN, kMaxPanelN});
    }
  }

  void convert(int64_t first_m, int m, int64_t k, int64_t elements) {
    for (int i = 0; i < m; ++i) {
      const char *x = x_at(first_m + i, k);
      char *out = x_ + i * kConvertedBytes;
      if (convert_.convert != nullptr) {
        convert_(x, elements, out);
      } else {
        std::memcpy(out, x, elements * element_bytes_);
        std::memset(out + elements * element_bytes_, 0,
                    (to_steps(elements) - elements) * element_bytes_);
      }
    }
  }

  const char *x_at(int64_t m, int64_t k) const { return address_of_x(problem_, m, k); }

  const MatmulKernels &kernels_;
  const MatmulProblem &problem_;
  const Weight &weight_;
  const int64_t element_bytes_;  // of the panel
  const int64_t row_bytes_;      // of the panel
  const int64_t panel_n_;
  RangeDequantizer dequant_;
  const PaddedConversion convert_;
  alignas(64) char panel_[kPanelBytes];
  alignas(64) char x_[kMaxTileM * kConvertedBytes];
};

}  // namespace

void matmul_panel(const DequantKernels &dequant, const MatmulKernels &kernels,
                  const MatmulProblem &problem, RowRange n) {
  PanelMultiplier(dequant, kernels, problem)(n);
}

}  // namespace nf4::cpu
