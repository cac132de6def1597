// Matmul for many columns of x: a panel of rows of the weight is dequantized into the caches and
// multiplied with all columns.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/formats.hpp"
#include "cpu/matmul_parts.hpp"
#include "cpu/scales.hpp"

namespace nf4::cpu {
namespace {

constexpr int64_t kPanelRows = 16;
constexpr int64_t kPanelRowBytes = 4096;
constexpr int64_t kMaxPanelRow = kPanelRowBytes / 2;
constexpr int64_t kMaxTileColumns = 6;
// Columns of x for which a panel serves.
constexpr int64_t kPanelColumns = 96;

// A NaN as DequantRun wants it.
float canonical(float x) { return std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : x; }

int64_t to_steps(int64_t elements) { return ceil_divide(elements, kKernelStep) * kKernelStep; }

// Dequantizes any part of a weight.
class Decoder {
 public:
  Decoder(const Weight &weight, void (*kernel)(const DequantRun &), int64_t element_bytes)
      : weight_(weight), kernel_(kernel), element_bytes_(element_bytes) {
    std::transform(codebook(weight_), codebook(weight_) + kCodebookSize, codebook_, canonical);
  }

  // `count` elements from `first` on, at most kMaxPanelRow, and zeros up to a whole step.
  void operator()(int64_t first, int64_t count, char *out) {
    const int64_t lead = first % kKernelStep;
    if (lead == 0 && count % kKernelStep == 0) return decode_steps(first, first + count, out);
    decode_steps(first - lead, first + count, shifted_);
    std::memcpy(out, shifted_ + lead * element_bytes_, count * element_bytes_);
    std::memset(out + count * element_bytes_, 0, (to_steps(count) - count) * element_bytes_);
  }

 private:
  // Whole steps from `begin` to `end` or beyond it.
  void decode_steps(int64_t begin, int64_t end, char *out) {
    const int64_t in_block = begin & (weight_.blocksize() - 1);
    if (in_block != 0) {
      const int64_t part = std::min(end - begin, weight_.blocksize() - in_block);
      decode_blocks(begin, part, out);
      begin += part;
      out += part * element_bytes_;
    }
    if (begin < end) decode_blocks(begin, end - begin, out);
  }

  // Elements of one block, or of any that begin with a whole one.
  void decode_blocks(int64_t first, int64_t elements, char *out) {
    const int64_t block = first >> weight_.blocksize_log2;
    const int64_t last = (first + elements - 1) >> weight_.blocksize_log2;
    read_scales(weight_, block, last - block + 1, scales_);
    std::transform(scales_, scales_ + (last - block + 1), scales_, canonical);
    const int64_t readable = weight_.elements - first;
    const int64_t whole = std::min(to_steps(elements), readable - readable % kKernelStep);
    const uint8_t *packed = weight_.packed + first / 2;
    kernel_({codebook_, packed, scales_, whole, weight_.blocksize(), out});
    if (whole >= elements) return;
    uint8_t padded[kKernelStep / 2] = {};
    std::memcpy(padded, packed + whole / 2, (elements - whole + 1) / 2);
    kernel_({codebook_, padded, scales_ + (last - block), kKernelStep, weight_.blocksize(),
             out + whole * element_bytes_});
  }

  const Weight &weight_;
  void (*const kernel_)(const DequantRun &);
  const int64_t element_bytes_;
  float codebook_[kCodebookSize];
  float scales_[kMaxPanelRow / kMinBlocksize + 2];
  alignas(64) char shifted_[kPanelRowBytes + 2 * kKernelStep * sizeof(float)];
};

class PanelMultiplier {
 public:
  PanelMultiplier(const KernelSet &dense, const MatmulKernels &kernels,
                  const MatmulProblem &problem)
      : kernels_(kernels),
        problem_(problem),
        weight_(problem.weight),
        element_bytes_(element_bytes(kernels.dtype)),
        decode_(problem.weight, dense.dequant[kernels.dtype - 1], element_bytes_),
        convert_{kernels.convert[problem.dtype - 1], kKernelStep, element_bytes(problem.dtype),
                 element_bytes_} {}

  void operator()(RowRange rows) {
    const int64_t groups = ceil_divide(problem_.m, kPanelColumns);
    for (int64_t row = rows.begin; row < rows.end; row += kPanelRows)
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = problem_.m * group / groups;
        const int64_t last = problem_.m * (group + 1) / groups;
        multiply({row, std::min(rows.end, row + kPanelRows)}, first,
                 static_cast<int>(last - first));
      }
  }

 private:
  void multiply(RowRange rows, int64_t first_column, int columns) {
    float sums[kPanelRows * kPanelColumns] = {};
    for (int64_t k = 0; k < weight_.cols;) {
      const int64_t elements = part_of_row(weight_.cols - k);
      for (int64_t row = rows.begin; row < rows.end; ++row)
        decode_(row * weight_.cols + k, elements, panel_ + (row - rows.begin) * kPanelRowBytes);
      add_products(rows, {first_column, first_column + columns}, k, elements, sums);
      k += elements;
    }
    store_sums(problem_, {rows, first_column, columns, sums, kPanelColumns});
  }

  // Whole steps as long as there are any.
  int64_t part_of_row(int64_t left) const {
    const int64_t most = kPanelRowBytes / element_bytes_;
    return left < kKernelStep ? left : std::min(most, left - left % kKernelStep);
  }

  void add_products(RowRange rows, RowRange columns, int64_t k, int64_t elements, float *sums) {
    const bool in_place = convert_.convert == nullptr && elements % kKernelStep == 0;
    for (int64_t column = columns.begin; column < columns.end; column += kernels_.tile_columns) {
      const int count =
          static_cast<int>(std::min<int64_t>(kernels_.tile_columns, columns.end - column));
      if (!in_place) convert(column, count, k, elements);
      const char *x = column_of_x(problem_, column) + k * convert_.bytes_in;
      kernels_.tile({panel_, kPanelRowBytes / element_bytes_, in_place ? x : x_,
                     in_place ? problem_.x_stride : kPanelRowBytes / element_bytes_,
                     to_steps(elements), static_cast<int>(rows.end - rows.begin), count,
                     sums + (column - columns.begin), kPanelColumns});
    }
  }

  void convert(int64_t first_column, int columns, int64_t k, int64_t elements) {
    for (int column = 0; column < columns; ++column) {
      const char *x = column_of_x(problem_, first_column + column) + k * convert_.bytes_in;
      char *out = x_ + column * kPanelRowBytes;
      if (convert_.convert != nullptr) {
        convert_(x, elements, out);
      } else {
        std::memcpy(out, x, elements * element_bytes_);
        std::memset(out + elements * element_bytes_, 0,
                    (to_steps(elements) - elements) * element_bytes_);
      }
    }
  }

  const MatmulKernels &kernels_;
  const MatmulProblem &problem_;
  const Weight &weight_;
  const int64_t element_bytes_;  // of the panel
  Decoder decode_;
  const PaddedConversion convert_;
  alignas(64) char panel_[kPanelRows * kPanelRowBytes];
  alignas(64) char x_[kMaxTileColumns * kPanelRowBytes];
};

}  // namespace

void matmul_panel(const KernelSet &dense, const MatmulKernels &kernels,
                  const MatmulProblem &problem, RowRange rows) {
  PanelMultiplier(dense, kernels, problem)(rows);
}

}  // namespace nf4::cpu
