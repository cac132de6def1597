// Matmul for integer weights in words of GPTQ and AWQ. The codes go from memory to the sums, which
// are kept for a block of rows, group by group. For many rows of x they go through a block of words
// in the L1 cache, in GPTQ's order. docs/design/cpu.md has the rates.
#include "cpu/matmul/columns.hpp"

#include "cpu/dequant/int4_groups.hpp"
#include "cpu/weight/int4.hpp"

namespace nf4::cpu {
namespace {

constexpr int64_t kMaxM = 64;
// With more rows of x than this, blocks are worth their cost.
constexpr int64_t kMaxDirectGptq = 16, kMaxDirectAwq = 8;
// The columns of a row that are processed at once, if groups are no larger.
constexpr int64_t kColumns = 128;
constexpr int64_t kMaxGroups = 8;
// The sums that are kept at once: as many rows of the weight as the stack has room for.
constexpr int64_t kSums = 24576;

class ColumnsMultiplier : ColumnsBase<kMaxM, kSums> {
 public:
  ColumnsMultiplier(const DequantKernels &dequant, const MatmulKernels &kernels,
                    const Int4MatmulProblem &problem)
      : ColumnsBase(kernels, problem),
        dequant_(dequant),
        gptq_(problem.weight.layout == NF4_INT4_GPTQ),
        in_blocks_(gptq_ ? problem.m > kMaxDirectGptq
                         : problem.m > kMaxDirectAwq || kernels.awq_columns == nullptr) {}

  void operator()(RowRange n) {
    for_blocks(
        n, [this](RowRange rows) { multiply(rows); },
        [this](RowRange rows) {
          if (!gptq_ && !in_blocks_) sort_sums(rows.end - rows.begin);
        });
  }

 private:
  void multiply(RowRange n) {
    for (int64_t k = 0; k < weight_.cols; k += x_stride_) {
      const int64_t end = std::min(weight_.cols, k + x_stride_);
      prepare(k, end - k);
      for (int64_t part = k; part < end;) {
        // Takes the rest of a group, or some whole groups.
        const int64_t size = weight_.group_size, in_group = part % size;
        const int64_t most = in_blocks_ ? kColumns : end - part;
        const int64_t cols = std::min({most, end - part, size - in_group});
        int64_t groups = std::clamp<int64_t>(std::min(kColumns, end - part) / size, 1, kMaxGroups);
        if (in_group != 0) groups = 1;
        ColumnsArgs args = args_of(part - k, cols, groups);
        if (weight_.zeros != nullptr) sum_x(args, part - k);
        in_blocks_ ? add_blocks(args, n, part) : add_words(args, n, part, part - k);
        part += cols * groups;
      }
    }
  }

  // Does nothing if that part of x was already prepared for the previous block of rows.
  void prepare(int64_t k, int64_t elements) {
    if (prepared_k_ == k && prepared_m_ == m_.begin) return;
    prepared_k_ = k;
    prepared_m_ = m_.begin;
    for (int64_t m = m_.begin; m < m_.end; ++m) {
      for (int64_t i = 0; i < elements; i += kGathered) {
        const int64_t count = std::min(kGathered, elements - i);
        convert(part_of_x(problem_, m, k + i, count, gathered_), count, prepared(m - m_.begin, i),
                gptq_ || in_blocks_);
      }
      if (in_blocks_) expect_x(m, k + elements < weight_.cols ? k + elements : 0);
    }
  }

  // Prefetches the part of row m that is prepared next.
  __attribute__((always_inline)) void expect_x(int64_t m, int64_t k) const {
    const char *const x = address_of_x(problem_, m, k);
    const int64_t bytes = std::min(x_stride_, weight_.cols - k) * element_bytes(problem_.dtype);
    for (int64_t i = 0; i < bytes; i += kLineBytes) __builtin_prefetch(x + i, 0, 2);
  }

  void sum_x(ColumnsArgs &args, int64_t at) {
    args.x_sums = x_sums_;
    args.x_sums_stride = args.groups;
    if (args.groups == 1)
      return kernels_.column_sums(prepared(0, at), x_stride_, args.cols, args.m, x_sums_);
    for (int i = 0; i < args.m; ++i)
      kernels_.column_sums(prepared(i, at), args.cols, args.cols, args.groups,
                           x_sums_ + i * args.groups);
  }

  const uint32_t *words(int64_t n, int64_t k) const {
    return weight_.packed + int4_code(weight_.layout, weight_.rows, weight_.cols, n, k).word;
  }
  int64_t words_stride() const { return gptq_ ? weight_.rows : weight_.rows / kInt4PerWord; }

  // `at` counts the prepared columns.
  void add_words(ColumnsArgs args, RowRange n, int64_t k, int64_t at) {
    const auto &w = weight_;
    const int64_t group = k / w.group_size;
    args.words = words(n.begin, k);
    args.stride = words_stride();
    args.rows = n.end - n.begin;
    args.scales = static_cast<const uint16_t *>(w.scales) +
                  int4_scale(w.layout, w.rows, w.groups, n.begin, group);
    args.fp16_scales = w.scales_dtype == NF4_DTYPE_FP16;
    args.scale_stride = w.rows;
    if (w.zeros != nullptr)
      args.zeros = w.zeros + int4_zero(w.layout, w.rows, w.groups, n.begin, group).word;
    args.zero_stride = int4_words(w.rows);
    args.zero_offset = w.zero_offset * kInt4Ones;
    args.nibble_stride = block_n_ / kInt4PerWord;
    const int64_t next_k = k + args.cols * args.groups;
    args.next.words = next_k < w.cols ? words(n.begin, next_k) : words(n.end, 0);
    args.next.stride = args.stride;
    for (int64_t m = 0; m < m_.end - m_.begin; m += kMaxDotM) {
      ColumnsArgs part = args;
      part.m = static_cast<int>(std::min<int64_t>(kMaxDotM, args.m - m));
      part.x = prepared(m, at);
      part.sums += m * args.sums_stride;
      if (args.x_sums != nullptr) part.x_sums += m * args.x_sums_stride;
      (gptq_ ? kernels_.gptq_columns : kernels_.awq_columns)(part);
    }
  }

  void add_blocks(ColumnsArgs args, RowRange n, int64_t k) {
    const int64_t columns = args.cols * args.groups, stride = words_stride();
    args.words = block_;
    args.stride = kVectorRows;
    args.block_scales = groups_.scales;
    args.block_zeros = groups_.zeros;
    args.scale_stride = kVectorRows;
    args.next.stride = stride;
    args.next.step = gptq_ ? kernels_.column_lanes : kColumns / kInt4PerWord * stride;
    for (int64_t i = n.begin; i < n.end; i += kVectorRows) {
      args.rows = std::min(kVectorRows, n.end - i);
      args.sums = sums_ + (i - n.begin);
      (gptq_ ? dequant_.gptq_words
             : dequant_.awq_words)({words(i, k), stride, args.rows, columns,
                                    reinterpret_cast<uint8_t *>(block_), kVectorRows * 4});
      for (int g = 0; g < args.groups; ++g)
        dequant_.groups(int4_groups(weight_, i, k / weight_.group_size + g, args.rows,
                                    groups_.scales + g * kVectorRows,
                                    groups_.zeros + g * kVectorRows));
      const bool last = i + kVectorRows >= n.end, in_block = !last || k + columns < weight_.cols;
      const int64_t next_n = !last ? i + kVectorRows : in_block ? n.begin : n.end;
      const int64_t next_k = !last ? k : in_block ? k + columns : 0;
      args.next.words = words(next_n, next_k);
      expect_groups(next_n, next_k / weight_.group_size, args.groups);
      kernels_.block_columns(args);
    }
  }

  // Prefetches what dequant_.groups() reads next. It is inlined, as GCC drops calls that only
  // prefetch.
  __attribute__((always_inline)) void expect_groups(int64_t n, int64_t first, int groups) const {
    const auto &w = weight_;
    for (int64_t g = first; g < first + groups; ++g) {
      const auto *scales =
          static_cast<const uint16_t *>(w.scales) + int4_scale(w.layout, w.rows, w.groups, n, g);
      for (int64_t i = 0; i < kVectorRows; i += 32) __builtin_prefetch(scales + i, 0, 2);
      if (w.zeros != nullptr)
        __builtin_prefetch(w.zeros + int4_zero(w.layout, w.rows, w.groups, n, g).word, 0, 2);
    }
  }

  // Reorders the sums from the order of nibbles to that of rows.
  void sort_sums(int64_t rows) {
    const int64_t stride = block_n_ / kInt4PerWord;
    for (int64_t m = 0; m < m_.end - m_.begin; ++m) {
      float *const sums = sums_ + m * block_n_;
      std::copy_n(sums, block_n_, by_nibble_);
      for (int64_t i = 0; i < rows; ++i)
        sums[i] = by_nibble_[awq_nibble(static_cast<int>(i % 8)) * stride + i / 8];
    }
  }

  static constexpr int64_t kLineBytes = 64;
  static constexpr int64_t kGathered = 1024;  // in elements, whole steps

  const DequantKernels &dequant_;
  const bool gptq_;
  const bool in_blocks_;
  int64_t prepared_k_ = -1;
  int64_t prepared_m_ = -1;
  float x_sums_[kMaxM * kMaxGroups];
  // Blocks use the first member; sorting, which has no blocks, uses the second.
  union {
    struct {
      float scales[kMaxGroups * kVectorRows];
      float zeros[kMaxGroups * kVectorRows];
    } groups_;
    float by_nibble_[kMaxBlockN];
  };
  union {
    alignas(64) char gathered_[kGathered * sizeof(float)];
    alignas(64) uint32_t block_[kColumns / kInt4PerWord * kVectorRows];
  };
};

}  // namespace

void matmul_columns(const DequantKernels &dequant, const MatmulKernels &kernels,
                    const Int4MatmulProblem &problem, RowRange n) {
  ColumnsMultiplier(dequant, kernels, problem)(n);
}

}  // namespace nf4::cpu
