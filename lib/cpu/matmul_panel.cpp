// Matmul for many columns of x: a panel of rows of the weight is dequantized into the caches and
// multiplied with all columns.
//
// On a Zen 4 3.3 ns for 64 weights to dequantize, of which 1.2 are the scales, and 0.58 for each
// column in bf16 (0.54 at one vdpbf16ps a cycle).
//
// Tried, ms on two cores, bf16, 14336 x 4096, for 16 and 64 columns:
// - Nothing prefetched: 8.4, 21.6; the codes of the panel after this: 6.5, 20.9.
// - Parts of a row of 1024, 2048 and 4096 elements, in the caches, ns for 64 weights and 64
//   columns: 42.1, 40.3, 39.3, as sums across a vector become fewer. Panels of 4 to 32 rows:
//   within 1 %.
// - Each vector of sums summed up by itself, in place of four together: 40.4.
// - Rows of the panel a line further apart than 4096 bytes, so as not to share places of the
//   first-level cache: nothing, as every line is loaded once.
#include <algorithm>
#include <cstring>

#include "cpu/decoder.hpp"
#include "cpu/matmul_parts.hpp"

namespace nf4::cpu {
namespace {

constexpr int64_t kPanelBytes = 65536;
constexpr int64_t kMaxPanelRows = 16;
// Of x, converted.
constexpr int64_t kConvertedBytes = 4096;
constexpr int64_t kMaxTileColumns = 6;
// Columns of x for which a panel serves.
constexpr int64_t kPanelColumns = 96;

class PanelMultiplier {
 public:
  PanelMultiplier(const KernelSet &dense, const MatmulKernels &kernels,
                  const MatmulProblem &problem)
      : kernels_(kernels),
        problem_(problem),
        weight_(problem.weight),
        element_bytes_(element_bytes(kernels.dtype)),
        row_bytes_(kernels.tile_elements * element_bytes_),
        panel_rows_(std::min(kMaxPanelRows, kPanelBytes / row_bytes_)),
        decode_(dense, problem.weight, kernels.dtype),
        convert_{kernels.convert[problem.dtype - 1], kKernelStep, element_bytes(problem.dtype),
                 element_bytes_} {}

  // All rows for some columns, which stay in the second-level cache.
  void operator()(RowRange rows) {
    const int64_t groups = ceil_divide(problem_.m, kPanelColumns);
    for (int64_t group = 0; group < groups; ++group) {
      const RowRange columns{problem_.m * group / groups, problem_.m * (group + 1) / groups};
      for (int64_t row = rows.begin; row < rows.end; row += panel_rows_)
        multiply({row, std::min(rows.end, row + panel_rows_)}, columns);
    }
  }

 private:
  void multiply(RowRange rows, RowRange columns) {
    float sums[kPanelColumns * kMaxPanelRows] = {};
    for (int64_t k = 0; k < weight_.cols;) {
      const int64_t elements = part_of_row(weight_.cols - k);
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        prefetch((row + panel_rows_) * weight_.cols + k, elements);
        decode_(row * weight_.cols + k, elements, panel_ + (row - rows.begin) * row_bytes_);
      }
      add_products(static_cast<int>(rows.end - rows.begin), columns, k, elements, sums);
      k += elements;
    }
    store_sums(problem_, {rows, columns, sums, kMaxPanelRows});
  }

  void prefetch(int64_t first, int64_t elements) const {
    const uint8_t *packed = weight_.packed + first / 2;
    for (int64_t i = 0; i < elements / 2; i += 64) __builtin_prefetch(packed + i, 0, 2);
  }

  // Whole steps as long as there are any.
  int64_t part_of_row(int64_t left) const {
    if (left < kKernelStep) return left;
    return std::min<int64_t>(kernels_.tile_elements, left - left % kKernelStep);
  }

  void add_products(int rows, RowRange columns, int64_t k, int64_t elements, float *sums) {
    const bool in_place = convert_.convert == nullptr && elements % kKernelStep == 0;
    for (int64_t column = columns.begin; column < columns.end; column += kernels_.tile_columns) {
      const int count =
          static_cast<int>(std::min<int64_t>(kernels_.tile_columns, columns.end - column));
      if (!in_place) convert(column, count, k, elements);
      kernels_.tile({panel_, kernels_.tile_elements, in_place ? x_at(column, k) : x_,
                     in_place ? problem_.x_stride : kConvertedBytes / element_bytes_,
                     to_steps(elements), rows, count,
                     sums + (column - columns.begin) * kMaxPanelRows, kMaxPanelRows});
    }
  }

  void convert(int64_t first_column, int columns, int64_t k, int64_t elements) {
    for (int column = 0; column < columns; ++column) {
      const char *x = x_at(first_column + column, k);
      char *out = x_ + column * kConvertedBytes;
      if (convert_.convert != nullptr) {
        convert_(x, elements, out);
      } else {
        std::memcpy(out, x, elements * element_bytes_);
        std::memset(out + elements * element_bytes_, 0,
                    (to_steps(elements) - elements) * element_bytes_);
      }
    }
  }

  const char *x_at(int64_t column, int64_t k) const { return address_of_x(problem_, column, k); }

  const MatmulKernels &kernels_;
  const MatmulProblem &problem_;
  const Weight &weight_;
  const int64_t element_bytes_;  // of the panel
  const int64_t row_bytes_;      // of the panel
  const int64_t panel_rows_;
  Decoder decode_;
  const PaddedConversion convert_;
  alignas(64) char panel_[kPanelBytes];
  alignas(64) char x_[kMaxTileColumns * kConvertedBytes];
};

}  // namespace

void matmul_panel(const KernelSet &dense, const MatmulKernels &kernels,
                  const MatmulProblem &problem, RowRange rows) {
  PanelMultiplier(dense, kernels, problem)(rows);
}

}  // namespace nf4::cpu
