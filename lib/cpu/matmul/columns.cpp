// Matmul for few rows of x of integer weights in words of GPTQ and AWQ: the codes go from memory to
// the sums, which are kept for a block of rows, group by group. docs/design/cpu.md has the rates.
#include <algorithm>
#include <cstring>

#include "cpu/matmul/parts.hpp"
#include "cpu/weight/int4.hpp"

namespace nf4::cpu {
namespace {

// Sums that are kept at once, and rows of the weight that they are of at most: whole vectors of
// AWQ's words.
constexpr int64_t kSums = 8192;
constexpr int64_t kMaxBlockN = 4096;
constexpr int64_t kPreparedBytes = 32768;
// Of a row, done at once, if groups are no larger.
constexpr int64_t kColumns = 128;

class ColumnsMultiplier {
 public:
  ColumnsMultiplier(const MatmulKernels &kernels, const Int4MatmulProblem &problem)
      : kernels_(kernels),
        problem_(problem),
        weight_(problem.weight),
        element_bytes_(element_bytes(kernels.dtype)),
        gptq_(problem.weight.layout == NF4_INT4_GPTQ),
        block_n_(std::min(kMaxBlockN, kSums / problem.m / 128 * 128)),
        x_stride_(kPreparedBytes / element_bytes_ / problem.m / kKernelStep * kKernelStep),
        convert_{kernels.convert[problem.dtype - 1], kKernelStep, element_bytes(problem.dtype),
                 element_bytes_} {}

  void operator()(RowRange n) {
    for (int64_t i = n.begin; i < n.end; i += block_n_)
      multiply({i, std::min(n.end, i + block_n_)});
  }

 private:
  void multiply(RowRange n) {
    std::fill_n(sums_, problem_.m * block_n_, 0.0f);
    for (int64_t k = 0; k < weight_.cols; k += x_stride_) {
      const int64_t end = std::min(weight_.cols, k + x_stride_);
      prepare(k, end - k);
      for (int64_t part = k; part < end;) {
        // The rest of a group, or some whole ones.
        const int64_t size = weight_.group_size, in_group = part % size;
        const int64_t cols = std::min(end - part, size - in_group);
        const int64_t groups =
            std::clamp<int64_t>(std::min(kColumns, end - part) / size, 1, kMaxColumnGroups);
        add_products(n, part, cols, in_group == 0 ? groups : 1, part - k);
        part += in_group == 0 && cols == size ? groups * size : cols;
      }
    }
    if (!gptq_) sort_sums(n.end - n.begin);
    store_sums(problem_, {n, {0, problem_.m}, sums_, block_n_});
  }

  // Does nothing where that part of x is there from the block of rows before.
  void prepare(int64_t k, int64_t elements) {
    if (prepared_k_ == k) return;
    prepared_k_ = k;
    for (int64_t m = 0; m < problem_.m; ++m) {
      char *const out = x_ + m * x_stride_ * element_bytes_;
      for (int64_t i = 0; i < elements; i += kGathered) {
        const int64_t count = std::min(kGathered, elements - i);
        char *const to = out + i * element_bytes_;
        const char *from = part_of_x(problem_, m, k + i, count, gathered_);
        if (convert_.convert != nullptr)
          convert_(from, count, to);
        else
          std::memcpy(to, from, count * element_bytes_);
      }
      if (gptq_ && kernels_.dtype == NF4_DTYPE_BF16)
        pair_codes(reinterpret_cast<uint16_t *>(out), elements);
    }
  }

  // The columns of a word of GPTQ, of which i and i + 4 are in its halves: 0 4 1 5 2 6 3 7.
  static void pair_codes(uint16_t *x, int64_t elements) {
    for (int64_t i = 0; i < elements; i += 8) {
      uint16_t eight[8];
      std::copy_n(x + i, 8, eight);
      for (int j = 0; j < 8; ++j) x[i + j] = eight[j / 2 + j % 2 * 4];
    }
  }

  float sum_of_x(const char *x, int64_t elements) const {
    float sums[8] = {};
    for (int64_t i = 0; i < elements; i += 8)
      for (int j = 0; j < 8; ++j)
        sums[j] += kernels_.dtype == NF4_DTYPE_BF16
                       ? bf16_to_float(reinterpret_cast<const uint16_t *>(x)[i + j])
                       : reinterpret_cast<const float *>(x)[i + j];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
           ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  }

  // Columns of one group, or of some. at: of the prepared ones.
  void add_products(RowRange n, int64_t k, int64_t cols, int64_t groups, int64_t at) {
    const auto &w = weight_;
    const int64_t group = k / w.group_size;
    ColumnsArgs args{};
    args.codebook = int4_codebook(kernels_);
    args.words = w.packed + int4_code(w.layout, w.rows, w.cols, n.begin, k).word;
    args.stride = gptq_ ? w.rows : w.rows / kInt4PerWord;
    args.rows = n.end - n.begin;
    args.cols = cols;
    args.groups = static_cast<int>(groups);
    args.scale_stride = w.rows;
    args.zero_stride = int4_words(w.rows);
    args.scales = static_cast<const uint16_t *>(w.scales) +
                  int4_scale(w.layout, w.rows, w.groups, n.begin, group);
    args.fp16_scales = w.scales_dtype == NF4_DTYPE_FP16;
    if (w.zeros != nullptr)
      args.zeros = w.zeros + int4_zero(w.layout, w.rows, w.groups, n.begin, group).word;
    args.zero_offset = w.zero_offset * kInt4Ones;
    args.x_stride = x_stride_;
    args.sums_stride = block_n_;
    args.nibble_stride = (block_n_ / kInt4PerWord);
    for (int64_t m = 0; m < problem_.m; m += args.m) {
      args.m = static_cast<int>(std::min<int64_t>(kMaxDotM, problem_.m - m));
      const char *x = x_ + (m * x_stride_ + at) * element_bytes_;
      args.x = x;
      args.sums = sums_ + m * block_n_;
      for (int i = 0; i < args.m && w.zeros != nullptr; ++i)
        for (int64_t g = 0; g < groups; ++g)
          args.x_sums[i][g] = sum_of_x(x + (i * x_stride_ + g * cols) * element_bytes_, cols);
      (gptq_ ? kernels_.gptq_columns : kernels_.awq_columns)(args);
    }
  }

  // From the order of nibbles to that of rows.
  void sort_sums(int64_t rows) {
    float by_nibble[kMaxBlockN];
    for (int64_t m = 0; m < problem_.m; ++m) {
      float *const sums = sums_ + m * block_n_;
      std::copy_n(sums, block_n_, by_nibble);
      for (int64_t i = 0; i < rows; ++i)
        sums[i] =
            by_nibble[awq_nibble(static_cast<int>(i % 8)) * (block_n_ / kInt4PerWord) + i / 8];
    }
  }

  static constexpr int64_t kGathered = 1024;  // elements, whole steps

  const MatmulKernels &kernels_;
  const Int4MatmulProblem &problem_;
  const Int4Weight &weight_;
  const int64_t element_bytes_;  // of prepared x
  const bool gptq_;
  const int64_t block_n_;
  const int64_t x_stride_;
  const PaddedConversion convert_;
  int64_t prepared_k_ = -1;
  alignas(64) float sums_[kSums];
  alignas(64) char x_[kPreparedBytes];
  alignas(64) char gathered_[kGathered * sizeof(float)];
};

}  // namespace

void matmul_columns(const MatmulKernels &kernels, const Int4MatmulProblem &problem, RowRange n) {
  ColumnsMultiplier(kernels, problem)(n);
}

}  // namespace nf4::cpu
