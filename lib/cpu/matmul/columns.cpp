// Matmul for integer weights in words of GPTQ and AWQ: the codes go from memory to the sums, which
// are kept for a block of rows, group by group; for many rows of x by way of a block of words in
// the L1 cache, in the order of GPTQ's. docs/design/cpu.md has the rates.
#include <algorithm>
#include <cstring>

#include "cpu/dequant/int4_groups.hpp"
#include "cpu/matmul/parts.hpp"
#include "cpu/weight/int4.hpp"

namespace nf4::cpu {
namespace {

// Sums that are kept at once, and rows of the weight that they are of at most: whole vectors of
// AWQ's words.
constexpr int64_t kSums = 16384;
constexpr int64_t kMaxBlockN = 4096;
// Rows of x for which words are read once.
constexpr int64_t kMaxM = 64;
constexpr int64_t kPreparedBytes = 32768;
// Of a row, done at once, if groups are no larger.
constexpr int64_t kColumns = 128;
// Of a block of words.
constexpr int64_t kWordRows = 128;

class ColumnsMultiplier {
 public:
  ColumnsMultiplier(const DequantKernels &dequant, const MatmulKernels &kernels,
                    const Int4MatmulProblem &problem)
      : dequant_(dequant),
        kernels_(kernels),
        problem_(problem),
        weight_(problem.weight),
        element_bytes_(element_bytes(kernels.dtype)),
        gptq_(problem.weight.layout == NF4_INT4_GPTQ),
        in_blocks_(problem.m > kMaxDotM),
        groups_m_(ceil_divide(problem.m, kMaxM)),
        max_m_(ceil_divide(problem.m, groups_m_)),
        block_n_(std::min(kMaxBlockN, kSums / max_m_ / 128 * 128)),
        x_stride_(kPreparedBytes / element_bytes_ / max_m_ / kKernelStep * kKernelStep),
        convert_{kernels.convert[problem.dtype - 1], kKernelStep, element_bytes(problem.dtype),
                 element_bytes_} {}

  void operator()(RowRange n) {
    for (int64_t i = n.begin; i < n.end; i += block_n_)
      for (int64_t group = 0; group < groups_m_; ++group)
        multiply({i, std::min(n.end, i + block_n_)},
                 {problem_.m * group / groups_m_, problem_.m * (group + 1) / groups_m_});
  }

 private:
  void multiply(RowRange n, RowRange m) {
    m_ = m;
    std::fill_n(sums_, (m.end - m.begin) * block_n_, 0.0f);
    for (int64_t k = 0; k < weight_.cols; k += x_stride_) {
      const int64_t end = std::min(weight_.cols, k + x_stride_);
      prepare(k, end - k);
      for (int64_t part = k; part < end;) {
        // The rest of a group, or some whole ones.
        const int64_t size = weight_.group_size, in_group = part % size;
        const int64_t most = in_blocks_ ? kColumns : end - part;
        const int64_t cols = std::min({most, end - part, size - in_group});
        const int64_t groups = std::max<int64_t>(std::min(kColumns, end - part) / size, 1);
        add_products(n, part, cols, in_group == 0 ? groups : 1, part - k);
        part += in_group == 0 && cols == size ? groups * size : cols;
      }
    }
    if (!gptq_ && !in_blocks_) sort_sums(n.end - n.begin);
    store_sums(problem_, {n, m, sums_, block_n_});
  }

  // Does nothing where that part of x is there from the block of rows before.
  void prepare(int64_t k, int64_t elements) {
    if (prepared_k_ == k && prepared_m_ == m_.begin) return;
    prepared_k_ = k;
    prepared_m_ = m_.begin;
    for (int64_t m = m_.begin; m < m_.end; ++m) {
      char *const out = x_ + (m - m_.begin) * x_stride_ * element_bytes_;
      for (int64_t i = 0; i < elements; i += kGathered) {
        const int64_t count = std::min(kGathered, elements - i);
        char *const to = out + i * element_bytes_;
        const char *from = part_of_x(problem_, m, k + i, count, gathered_);
        if (convert_.convert != nullptr)
          convert_(from, count, to);
        else
          std::memcpy(to, from, count * element_bytes_);
      }
      if ((gptq_ || in_blocks_) && kernels_.pair_columns != nullptr)
        kernels_.pair_columns(out, ceil_divide(elements, kKernelStep) * kKernelStep);
    }
  }

  // Columns of one group, or of some. at: of the prepared ones.
  void add_products(RowRange n, int64_t k, int64_t cols, int64_t groups, int64_t at) {
    ColumnsArgs args{};
    args.codebook = int4_codebook(kernels_);
    args.cols = cols;
    args.groups = static_cast<int>(groups);
    args.x = x_ + at * element_bytes_;
    args.x_stride = x_stride_;
    args.m = static_cast<int>(m_.end - m_.begin);
    if (weight_.zeros != nullptr) {
      args.x_sums = x_sums_;
      args.x_sums_stride = groups;
      for (int i = 0; i < args.m; ++i)
        kernels_.column_sums(x_ + (i * x_stride_ + at) * element_bytes_, cols, groups,
                             x_sums_ + i * groups);
    }
    args.sums = sums_;
    args.sums_stride = block_n_;
    if (in_blocks_) return add_blocks(args, n, k);
    args.words = words(n.begin, k);
    args.stride = words_stride();
    args.rows = n.end - n.begin;
    read_groups(args, n.begin, k / weight_.group_size);
    args.nibble_stride = block_n_ / kInt4PerWord;
    (gptq_ ? kernels_.gptq_columns : kernels_.awq_columns)(args);
  }

  const uint32_t *words(int64_t n, int64_t k) const {
    return weight_.packed + int4_code(weight_.layout, weight_.rows, weight_.cols, n, k).word;
  }
  int64_t words_stride() const { return gptq_ ? weight_.rows : weight_.rows / kInt4PerWord; }

  void read_groups(ColumnsArgs &args, int64_t n, int64_t group) const {
    const auto &w = weight_;
    args.scales =
        static_cast<const uint16_t *>(w.scales) + int4_scale(w.layout, w.rows, w.groups, n, group);
    args.fp16_scales = w.scales_dtype == NF4_DTYPE_FP16;
    args.scale_stride = w.rows;
    if (w.zeros != nullptr)
      args.zeros = w.zeros + int4_zero(w.layout, w.rows, w.groups, n, group).word;
    args.zero_stride = int4_words(w.rows);
    args.zero_offset = w.zero_offset * kInt4Ones;
  }

  void add_blocks(ColumnsArgs args, RowRange n, int64_t k) {
    const int64_t columns = args.cols * args.groups, stride = words_stride();
    args.words = block_;
    args.stride = kWordRows;
    args.block_scales = scales_;
    args.block_zeros = zeros_;
    args.scale_stride = kWordRows;
    args.next.stride = stride;
    args.next.step = gptq_ ? kernels_.sum_lanes : kColumns / kInt4PerWord * stride;
    for (int64_t i = n.begin; i < n.end; i += kWordRows) {
      args.rows = std::min(kWordRows, n.end - i);
      args.sums = sums_ + (i - n.begin);
      (gptq_ ? dequant_.gptq_words
             : dequant_.awq_words)({words(i, k), stride, args.rows, columns,
                                    reinterpret_cast<uint8_t *>(block_), kWordRows * 4});
      for (int g = 0; g < args.groups; ++g)
        dequant_.groups(int4_groups(weight_, i, k / weight_.group_size + g, args.rows,
                                    scales_ + g * kWordRows, zeros_ + g * kWordRows));
      const bool last = i + kWordRows >= n.end;
      args.next.words = words(last ? n.begin : i + kWordRows, last ? k + columns : k);
      kernels_.block_columns(args);
    }
  }

  // From the order of nibbles to that of rows.
  void sort_sums(int64_t rows) {
    float by_nibble[kMaxBlockN];
    for (int64_t m = 0; m < m_.end - m_.begin; ++m) {
      float *const sums = sums_ + m * block_n_;
      std::copy_n(sums, block_n_, by_nibble);
      for (int64_t i = 0; i < rows; ++i)
        sums[i] =
            by_nibble[awq_nibble(static_cast<int>(i % 8)) * (block_n_ / kInt4PerWord) + i / 8];
    }
  }

  static constexpr int64_t kGathered = 1024;  // elements, whole steps

  const DequantKernels &dequant_;
  const MatmulKernels &kernels_;
  const Int4MatmulProblem &problem_;
  const Int4Weight &weight_;
  const int64_t element_bytes_;  // of prepared x
  const bool gptq_;
  const bool in_blocks_;
  const int64_t groups_m_;
  const int64_t max_m_;
  const int64_t block_n_;
  const int64_t x_stride_;
  const PaddedConversion convert_;
  RowRange m_{};
  int64_t prepared_k_ = -1;
  int64_t prepared_m_ = -1;
  float x_sums_[kMaxM * kColumns / kInt4PerWord];
  float scales_[kColumns / kInt4PerWord * kWordRows];
  float zeros_[kColumns / kInt4PerWord * kWordRows];
  alignas(64) uint32_t block_[kColumns / kInt4PerWord * kWordRows];
  alignas(64) float sums_[kSums];
  alignas(64) char x_[kPreparedBytes];
  alignas(64) char gathered_[kGathered * sizeof(float)];
};

}  // namespace

void matmul_columns(const DequantKernels &dequant, const MatmulKernels &kernels,
                    const Int4MatmulProblem &problem, RowRange n) {
  ColumnsMultiplier(dequant, kernels, problem)(n);
}

}  // namespace nf4::cpu
