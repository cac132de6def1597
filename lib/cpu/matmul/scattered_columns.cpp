// Matmul for integer weights whose groups g_idx scatters, and few rows of x: nothing is sorted. A
// lane is a row of the weight, which has a sum for each group; scales and zeros are applied at the
// end.
//
// Words of GPTQ are read in place; rows of codes are first reordered to words of GPTQ in the L1
// cache. 16 products take a load and a store of sums, which are the bound. docs/design/cpu.md has
// the rates.
#include <algorithm>
#include <cstring>

#include "cpu/dequant/int4_groups.hpp"
#include "cpu/matmul/parts.hpp"
#include "cpu/weight/int4.hpp"

namespace nf4::cpu {
namespace {

constexpr int64_t kMaxM = kMaxScatteredM;
constexpr int64_t kMaxSums = 16384, kWantedSums = 8192;
constexpr int64_t kMinBlockN = 64, kMaxBlockN = 128;
constexpr int64_t kMaxGroups = kMaxSums / kMinBlockN;  // for all rows of x
// The bytes of prepared x, all rows: a number and a zero in bf16, or fp32.
constexpr int64_t kMaxPrepared = 14336;
constexpr int64_t kColumns = 128;  // reordered to words of GPTQ at once
// The rows of compressed-tensors' scales that are read at once.
constexpr int64_t kRowsOfScales = 4;

class ScatteredColumnsMultiplier {
 public:
  ScatteredColumnsMultiplier(const DequantKernels &dequant, const MatmulKernels &kernels,
                             const Int4MatmulProblem &problem)
      : dequant_(dequant),
        kernels_(kernels),
        problem_(problem),
        weight_(problem.weight),
        m_(problem.m),
        block_n_(std::clamp(kWantedSums / (weight_.groups * m_) / 16 * 16, kMinBlockN, kMaxBlockN)),
        columns_(kMaxPrepared / m_ / kColumns * kColumns),
        convert_{kernels.convert[problem.dtype - 1], kKernelStep, element_bytes(problem.dtype),
                 element_bytes(kernels.dtype)} {}

  void operator()(RowRange n) {
    for (int64_t i = n.begin; i < n.end; i += block_n_) {
      std::fill_n(sums_, m_ * weight_.groups * block_n_, 0.0f);
      const RowRange rows{i, std::min(n.end, i + block_n_)};
      for (int64_t k = 0; k < weight_.cols; k += columns_) add_products(rows, k);
      apply_groups(rows);
      store_sums(problem_, {rows, {0, m_}, y_, kMaxBlockN});
    }
  }

 private:
  void add_products(RowRange n, int64_t k) {
    const int64_t end = std::min(weight_.cols, k + columns_);
    prepare(k, end - k);
    for (int64_t i = k; i < end; i += kColumns) {
      const int64_t cols = std::min(kColumns, end - i);
      ScatteredArgs args = words_of(n, i, cols);
      const bool last = i + cols == weight_.cols;
      set_next(args, last ? n.end : n.begin, last ? 0 : i + cols);
      args.codebook = int4_codebook(kernels_.dtype);
      args.rows = n.end - n.begin;
      args.cols = cols;
      args.groups = weight_.g_idx + i;
      args.x = x_ + (i - k) * sizeof(float);
      args.x_stride = x_stride();
      args.m = static_cast<int>(m_);
      args.sums = sums_;
      args.group_stride = block_n_;
      args.sums_stride = weight_.groups * block_n_;
      kernels_.scattered_columns(args);
    }
  }

  int64_t x_stride() const {  // in elements
    return (columns_ + 1) * static_cast<int64_t>(sizeof(float)) / element_bytes(kernels_.dtype);
  }

  const uint32_t *words(int64_t n, int64_t k) const {
    return weight_.packed + int4_code(weight_.layout, weight_.rows, weight_.cols, n, k).word;
  }
  int64_t row_words() const {  // from one row of words to the next
    return weight_.layout == NF4_INT4_GPTQ ? weight_.rows : int4_words(weight_.cols);
  }

  ScatteredArgs words_of(RowRange n, int64_t k, int64_t cols) {
    ScatteredArgs args{};
    args.words = words(n.begin, k);
    args.stride = row_words();
    if (weight_.layout == NF4_INT4_GPTQ) return args;
    const int64_t rows = n.end - n.begin;
    // gptq_rows is its own inverse: rows of codes become rows of words.
    dequant_.gptq_rows({args.words, args.stride, cols / kInt4PerWord, rows * kInt4PerWord,
                        reinterpret_cast<uint8_t *>(block_), kMaxBlockN * 4});
    args.words = block_;
    args.stride = kMaxBlockN;
    return args;
  }

  // Sets the words that are read next: in GPTQ a row of words for each row, otherwise some lines.
  void set_next(ScatteredArgs &args, int64_t n, int64_t k) const {
    args.next = {words(n, k), row_words(), kernels_.column_lanes};
    if (weight_.layout != NF4_INT4_GPTQ) args.next.step = kColumns / kInt4PerWord * row_words();
  }

  // Does nothing if that part of x was already prepared for the previous block of rows.
  void prepare(int64_t k, int64_t elements) {
    if (prepared_k_ == k) return;
    prepared_k_ = k;
    for (int64_t m = 0; m < m_; ++m) {
      char *const out = x_ + m * x_stride() * element_bytes(kernels_.dtype);
      for (int64_t i = 0; i < elements; i += kGathered) {
        const int64_t count = std::min(kGathered, elements - i);
        const char *from = part_of_x(problem_, m, k + i, count, gathered_);
        if (convert_.convert != nullptr) {
          convert_(from, count, converted_);
          from = converted_;
        }
        spread(from, count, out + i * sizeof(float));
        if (k + i >= summed_) sum(from, k + i, count, x_sums_ + m * weight_.groups);
      }
    }
    summed_ = std::max(summed_, k + elements);
  }

  // In bf16, each number is between zeros.
  void spread(const char *from, int64_t elements, char *out) const {
    if (kernels_.dtype == NF4_DTYPE_FP32) {
      std::memcpy(out, from, elements * sizeof(float));
      return;
    }
    const auto *numbers = reinterpret_cast<const uint16_t *>(from);
    auto *to = reinterpret_cast<uint16_t *>(out);
    for (int64_t i = 0; i < elements; ++i) {
      to[2 * i] = 0;
      to[2 * i + 1] = numbers[i];
    }
    to[2 * elements] = 0;
  }

  // Adds each element to the sum of its group.
  void sum(const char *from, int64_t k, int64_t elements, float *sums) const {
    for (int64_t i = 0; i < elements; ++i) {
      const float number = kernels_.dtype == NF4_DTYPE_FP32
                               ? reinterpret_cast<const float *>(from)[i]
                               : bf16_to_float(reinterpret_cast<const uint16_t *>(from)[i]);
      sums[weight_.g_idx[k + i]] += number;
    }
  }

  void apply_groups(RowRange n) {
    std::fill_n(y_, m_ * kMaxBlockN, 0.0f);
    if (weight_.layout == NF4_INT4_GPTQ) {
      for (int64_t g = 0; g < weight_.groups; ++g) {
        dequant_.groups(int4_groups(weight_, n.begin, g, n.end - n.begin, scales_, zeros_));
        apply_group(g, {0, n.end - n.begin}, scales_, zeros_, 1);
      }
      return;
    }
    for (int64_t i = n.begin; i < n.end; i += kRowsOfScales) {
      const RowRange rows{i - n.begin, std::min(n.end, i + kRowsOfScales) - n.begin};
      for (int64_t row = rows.begin; row < rows.end; ++row)
        dequant_.groups(int4_groups(weight_, n.begin + row, 0, weight_.groups,
                                    scales_ + (row - rows.begin) * kScaleStride,
                                    zeros_ + (row - rows.begin) * kScaleStride));
      for (int64_t g = 0; g < weight_.groups; ++g)
        apply_group(g, rows, scales_ + g, zeros_ + g, kScaleStride);
    }
  }

  // `stride` is the distance from the scale of a row to that of the next row.
  void apply_group(int64_t g, RowRange rows, const float *scales, const float *zeros,
                   int64_t stride) {
    for (int64_t m = 0; m < m_; ++m) {
      const float *sums = sums_ + (m * weight_.groups + g) * block_n_;
      const float x_sum = weight_.zeros == nullptr ? 0 : x_sums_[m * weight_.groups + g];
      for (int64_t i = rows.begin; i < rows.end; ++i) {
        const int64_t at = (i - rows.begin) * stride;
        const float sum = weight_.zeros == nullptr ? sums[i] : sums[i] + zeros[at] * x_sum;
        y_[m * kMaxBlockN + i] += scales[at] * sum;
      }
    }
  }

  static constexpr int64_t kGathered = 512;  // in elements, whole steps
  static constexpr int64_t kScaleStride = kMaxGroups + 16;

  const DequantKernels &dequant_;
  const MatmulKernels &kernels_;
  const Int4MatmulProblem &problem_;
  const Int4Weight &weight_;
  const int64_t m_;
  const int64_t block_n_;
  const int64_t columns_;  // the columns prepared at once
  const PaddedConversion convert_;
  int64_t prepared_k_ = -1;
  int64_t summed_ = 0;  // in columns
  float x_sums_[kMaxGroups] = {};
  float y_[kMaxM * kMaxBlockN];
  float scales_[kRowsOfScales * kScaleStride];
  float zeros_[kRowsOfScales * kScaleStride];
  alignas(64) uint32_t block_[kColumns / kInt4PerWord * kMaxBlockN];
  alignas(64) float sums_[kMaxSums];
  alignas(64) char x_[(kMaxPrepared + kMaxM) * sizeof(float)];
  alignas(64) char gathered_[kGathered * sizeof(float)];
  alignas(64) char converted_[kGathered * sizeof(float)];
};

}  // namespace

bool suits_scattered_columns(const Int4MatmulProblem &problem) {
  const Int4Weight &weight = problem.weight;
  return weight.g_idx != nullptr && weight.layout != NF4_INT4_AWQ &&
         weight.cols % kInt4PerWord == 0 && problem.m <= kMaxM &&
         problem.m * weight.groups <= kMaxGroups;
}

void matmul_scattered_columns(const DequantKernels &dequant, const MatmulKernels &kernels,
                              const Int4MatmulProblem &problem, RowRange n) {
  ScatteredColumnsMultiplier(dequant, kernels, problem)(n);
}

}  // namespace nf4::cpu
