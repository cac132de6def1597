// Matmul for more rows of x than dot takes, in fp32, from rows of codes: a lane is a row of x, and
// weights are broadcast.
//
// x is transposed for some rows of the weight. A few of these are decoded into the L1 cache, in the
// order of prepared x, since a sum over all columns may take them in any order. The kernel of the
// gradient multiplies: each weight is a factor of the columns of the transposed x. Nothing is
// summed across lanes.
#include <algorithm>
#include <cstring>

#include "cpu/matmul/code_rows.hpp"
#include "cpu/matmul/parts.hpp"

namespace nf4::cpu {
namespace {

// The rows of the weight for which x is transposed once, and those that are decoded at once.
constexpr int64_t kBlockN = 144;
constexpr int64_t kDecodedN = 24;
// The rows of x that are transposed at once. The columns of a slice of them are side by side.
constexpr int64_t kMaxM = 64;
// The columns that are decoded and transposed at once, so that they stay in the L1 cache.
constexpr int64_t kColumns = 192;
constexpr int64_t kUnit = 64;  // columns that the kernels decode together
// Codes and scales of this many rows ahead are prefetched.
constexpr int64_t kRowsAhead = kDecodedN;
// The scales of a row that are kept, and a zero.
constexpr int64_t kMaxScales = 13;
static_assert((kMaxScales - 1) * kMinBlocksize >= kColumns, "those of kColumns at least");

template <class Rows, class Problem>
class TransposedMultiplier {
 public:
  TransposedMultiplier(const MatmulKernels &kernels, const Problem &problem, const Rows &rows)
      : kernels_(kernels),
        dot_(kernels.*Rows::kDot),
        problem_(problem),
        rows_(rows),
        cols_(problem.weight.cols),
        prepare_(kernels, dot_, problem),
        per_scale_(elements_per_scale(rows, cols_, kUnit)),
        scaled_columns_((kMaxScales - 1) * per_scale_ / kColumns * kColumns) {}

  void operator()(RowRange n, RowRange all) {
    const int64_t slices = ceil_divide(all.end - all.begin, kSliceM);
    const int64_t groups = ceil_divide(slices, kMaxM / kSliceM);
    for (int64_t group = 0; group < groups; ++group) {
      const RowRange m{all.begin + slices * group / groups * kSliceM,
                       std::min(all.end, all.begin + slices * (group + 1) / groups * kSliceM)};
      for (int64_t i = n.begin; i < n.end; i += kBlockN)
        multiply({i, std::min(n.end, i + kBlockN)}, m);
    }
  }

 private:
  void multiply(RowRange n, RowRange m) {
    const int64_t lanes = ceil_divide(m.end - m.begin, kTransposedM) * kTransposedM;
    std::fill_n(sums_, kBlockN * lanes, 0.0f);
    for (int64_t k = 0; k < cols_; k += kColumns) {
      const int64_t elements = std::min(kColumns, cols_ - k);
      if (k % scaled_columns_ == 0) read_scales(n, k);
      transpose(m, lanes, k, elements);
      for (int64_t i = n.begin; i < n.end; i += kDecodedN) {
        const RowRange rows{i, std::min(n.end, i + kDecodedN)};
        decode(rows, i - n.begin, k, elements);
        add_products(rows, lanes, k, elements, sums_ + (i - n.begin) * lanes);
      }
    }
    store(n, m, lanes);
  }

  static int64_t to_units(int64_t elements) { return ceil_divide(elements, kUnit) * kUnit; }

  // The rows of a slice that are in use.
  static int64_t width(int64_t slice, int64_t lanes) { return std::min(kSliceM, lanes - slice); }

  // Prepares the rows in the memory of decoded codes.
  void transpose(RowRange m, int64_t lanes, int64_t k, int64_t elements) {
    for (int64_t i = 0; i < lanes; i += kTransposedM) {
      for (int64_t j = 0; j < kTransposedM; ++j) {
        float *const row = decoded_ + j * kColumns;
        if (m.begin + i + j < m.end)
          prepare_(m.begin + i + j, k, elements, reinterpret_cast<char *>(row));
        else
          std::fill_n(row, to_units(elements), 0.0f);
      }
      const int64_t slice = i / kSliceM * kSliceM;
      kernels_.transpose_x(decoded_, kColumns, to_units(elements),
                           x_ + slice * kColumns + (i - slice), width(slice, lanes));
    }
  }

  // Reads the scales of rows n from column k on, in the unit of the codebook's numbers. A zero
  // follows, for the end of a last unit.
  void read_scales(RowRange n, int64_t k) {
    const int64_t elements = std::min(scaled_columns_, cols_ - k);
    const int64_t count = elements / per_scale_;
    for (int64_t i = 0; i < n.end - n.begin; ++i) {
      float *const scales = scales_ + i * kMaxScales, *const zeros = zeros_ + i * kMaxScales;
      rows_.prefetch(n.begin + i + kRowsAhead, k, elements);
      rows_.read(n.begin + i, k, elements, per_scale_, scales, zeros);
      for (int64_t j = 0; j < count; ++j) scales[j] *= rows_.unit();
      scales[count] = zeros[count] = 0;
    }
  }

  // Decodes parts of rows. Elements beyond the end of a row become 0. `first` counts the rows of
  // the block.
  void decode(RowRange n, int64_t first, int64_t k, int64_t elements) {
    const int64_t scale = first * kMaxScales + k % scaled_columns_ / per_scale_;
    const int64_t tail = elements % kUnit;
    DecodeArgs args{rows_.codebook(),
                    rows_.packed() + n.begin * rows_.row_bytes() + k / 2,
                    rows_.row_bytes(),
                    scales_ + scale,
                    rows_.has_zeros() ? zeros_ + scale : nullptr,
                    kMaxScales,
                    static_cast<int>(kUnit / per_scale_),
                    elements - tail,
                    n.end - n.begin,
                    decoded_,
                    kColumns};
    dot_.decode(args);
    if (tail == 0) return;
    const int64_t whole = args.elements;
    uint8_t padded[kDecodedN][kUnit / 2] = {};
    for (int64_t i = 0; i < args.n; ++i)
      std::memcpy(padded[i], args.packed + i * args.row_bytes + whole / 2, tail / 2);
    args.packed = padded[0];
    args.row_bytes = kUnit / 2;
    args.scales += whole / per_scale_;
    if (rows_.has_zeros()) args.zeros += whole / per_scale_;
    args.elements = kUnit;
    args.out += whole;
    dot_.decode(args);
  }

  void add_products(RowRange n, int64_t lanes, int64_t k, int64_t elements, float *sums) {
    for (int64_t row = n.begin; row < n.end; ++row)
      prefetch_lines(rows_.packed() + (row + kRowsAhead) * rows_.row_bytes() + k / 2, elements / 2);
    for (int64_t slice = 0; slice < lanes; slice += kSliceM) {
      const int64_t columns = width(slice, lanes);
      kernels_.outer({x_ + slice * kColumns, columns, decoded_, kColumns,
                      static_cast<int>(to_units(elements)), static_cast<int>(columns),
                      static_cast<int>(n.end - n.begin), sums + slice, lanes});
    }
  }

  // Brings the sums into the order of y, in the memory of x.
  void store(RowRange n, RowRange m, int64_t lanes) {
    float *const values = x_;
    for (int64_t i = 0; i < n.end - n.begin; ++i)
      for (int64_t j = 0; j < m.end - m.begin; ++j) values[j * kBlockN + i] = sums_[i * lanes + j];
    const Sums done{n, m, values, kBlockN};
    add_adapter(kernels_, problem_, done);
    store_sums(problem_, done);
  }

  const MatmulKernels &kernels_;
  const DotKernels &dot_;
  const Problem &problem_;
  const Rows rows_;
  const int64_t cols_;
  const UnitsOfX<Problem> prepare_;
  const int64_t per_scale_;       // in elements
  const int64_t scaled_columns_;  // columns whose scales are read at once: a multiple of kColumns
  alignas(64) float x_[kMaxM * kColumns];  // [slice][column][row of the slice]
  alignas(64) float decoded_[kDecodedN * kColumns];
  alignas(64) float sums_[kBlockN * kMaxM];
  // Rows follow each other. Numbers that are written beyond the end of a row belong to the next
  // row, which is read later.
  float scales_[kBlockN * kMaxScales + kScalePadding];
  float zeros_[kBlockN * kMaxScales + kScalePadding];
};

}  // namespace

void matmul_transposed(const MatmulKernels &kernels, const MatmulProblem &problem,
                       const RoundedCodebook &bf16_codebook, RowRange n, RowRange m) {
  if (problem.weight.low_nibble_first()) {
    using Multiplier = TransposedMultiplier<E2m1Rows, MatmulProblem>;
    return Multiplier(kernels, problem, {kernels, problem.weight, bf16_codebook})(n, m);
  }
  using Multiplier = TransposedMultiplier<CodebookRows, MatmulProblem>;
  Multiplier(kernels, problem, {kernels, problem.weight, bf16_codebook})(n, m);
}

void matmul_transposed(const DequantKernels &dequant, const MatmulKernels &kernels,
                       const Int4MatmulProblem &problem, RowRange n, RowRange m) {
  using Multiplier = TransposedMultiplier<IntegerRows, Int4MatmulProblem>;
  Multiplier(kernels, problem, {dequant, kernels, problem.weight})(n, m);
}

}  // namespace nf4::cpu
