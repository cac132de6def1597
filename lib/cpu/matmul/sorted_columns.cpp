// Matmul for integer weights whose groups g_idx scatters, or whose rows of codes have groups that
// are not whole steps. Columns are sorted by their groups, some thousand at a time. The nibbles of
// their words are sorted the same way in the L1 cache, for a few rows of the weight. The rest is as
// in columns.cpp.
#include "cpu/dequant/int4_groups.hpp"
#include "cpu/dtypes.hpp"
#include "cpu/matmul/column_order.hpp"
#include "cpu/matmul/columns.hpp"
#include "cpu/weight/int4.hpp"

namespace nf4::cpu {
namespace {

constexpr int64_t kMaxM = 16;

class SortedColumnsMultiplier : ColumnsBase<kMaxM, 6144> {
 public:
  SortedColumnsMultiplier(const DequantKernels &dequant, const MatmulKernels &kernels,
                          const Int4MatmulProblem &problem)
      : ColumnsBase(kernels, problem),
        dequant_(dequant),
        awq_(problem.weight.layout == NF4_INT4_AWQ),
        columns_(columns_of(problem.weight)),
        rows_(awq_ ? kVectorRows : kCodes / columns_) {}

  void operator()(RowRange n) {
    for_blocks(n, [this](RowRange rows) { multiply(rows); }, [](RowRange) {});
  }

 private:
  // The nibbles that are brought together in words before they are sorted.
  static constexpr int64_t kCodes = kVectorRows * 1024;
  static constexpr int64_t kBlockWords = ColumnOrder::kMaxGroupPlaces / kInt4PerWord * kVectorRows;
  // A group has at least 8 places of x.
  static constexpr int64_t kMaxXSums = kPreparedBytes / 2 / kInt4PerWord;

  // The columns sorted at once: in GPTQ some tens per group, otherwise long parts of rows of words.
  static int64_t columns_of(const Int4Weight &weight) {
    if (weight.layout == NF4_INT4_COMPRESSED_TENSORS) return ColumnOrder::kMaxColumns;
    return weight.groups <= 32 ? 1024 : weight.groups <= 64 ? 2048 : ColumnOrder::kMaxColumns;
  }

  void multiply(RowRange n) {
    for (int64_t k = 0; k < weight_.cols; k += order_.columns()) {
      prepare(k);
      for (int64_t i = n.begin; i < n.end; i += rows_) {
        const RowRange rows{i, std::min(n.end, i + rows_)};
        prefetch_groups(i);
        load(rows, k);
        set_next(rows.end < n.end ? rows.end : n.begin, k);
        for (const ColumnOrder::Group &group : order_) add_group(group, rows, n.begin);
      }
    }
  }

  // Does nothing if that part of x was already prepared for the previous block of rows.
  void prepare(int64_t k) {
    if (prepared_k_ == k && prepared_m_ == m_.begin) return;
    prepared_k_ = k;
    prepared_m_ = m_.begin;
    order_.assign(weight_, k, columns_, x_stride_, sorted_);
    for (int64_t i = 0; i < m_.end - m_.begin; ++i) {
      for (int64_t at = 0; at < order_.places(); at += kGathered) {
        const int64_t count = std::min(kGathered, order_.places() - at);
        gather(address_of_x(problem_, m_.begin + i, 0), k, order_.column() + at, count);
        convert(gathered_, count, prepared(i, at), true);
      }
      float *sum = x_sums_ + i * (order_.end() - order_.begin());
      for (const ColumnOrder::Group &group : order_)
        kernels_.column_sums(prepared(i, group.first), 0, group.places, 1, sum++);
    }
  }

  void gather(const char *x, int64_t k, const int16_t *column, int64_t count) {
    with_dtype(problem_.dtype, [&](auto type) {
      const auto *from = reinterpret_cast<const decltype(type) *>(x);
      auto *to = reinterpret_cast<decltype(type) *>(gathered_);
      for (int64_t i = 0; i < count; ++i)
        to[i] = column[i] < 0 ? decltype(type){} : from[int4_column(weight_, k + column[i])];
    });
  }

  // Makes words of the columns from k on accessible; AWQ words are read in place.
  void load(RowRange n, int64_t k) {
    const auto &w = weight_;
    const int64_t columns = order_.columns(), rows = n.end - n.begin;
    const uint32_t *words = w.packed + int4_code(w.layout, w.rows, w.cols, n.begin, k).word;
    words_ = {words,    w.rows / kInt4PerWord, rows, 0, reinterpret_cast<uint8_t *>(block_),
              rows_ * 4};
    if (awq_) return;
    auto *to = reinterpret_cast<uint8_t *>(rows_of_words_);
    words_.words = rows_of_words_;
    words_.stride = rows_;
    if (w.layout == NF4_INT4_GPTQ)
      dequant_.gptq_words({words, w.rows, rows, columns, to, rows_ * 4});
    else  // gptq_rows is its own inverse: rows of codes become rows of words.
      dequant_.gptq_rows(
          {words, int4_words(w.cols), int4_words(columns), rows * kInt4PerWord, to, rows_ * 4});
  }

  // Sets the words that add_group() prefetches: those that are loaded next, from row n on. The
  // words of a place are about those of a row.
  void set_next(int64_t n, int64_t k) {
    const auto &w = weight_;
    next_ = {block_, 0, 0};
    if (w.layout == NF4_INT4_GPTQ)
      next_ = {w.packed + int4_code(w.layout, w.rows, w.cols, n, k).word, w.rows,
               kernels_.column_lanes};
  }

  int64_t group_of_weight(const ColumnOrder::Group &group) const {
    return int4_group(weight_, prepared_k_ + order_.column()[group.first]);
  }

  // It is inlined, as GCC drops calls that only prefetch.
  __attribute__((always_inline)) void prefetch_groups(int64_t n) const {
    const auto &w = weight_;
    if (w.layout == NF4_INT4_COMPRESSED_TENSORS) return;
    for (const ColumnOrder::Group &group : order_) {
      const int64_t of_weight = group_of_weight(group);
      const int64_t scale = int4_scale(w.layout, w.rows, w.groups, n, of_weight);
      for (int64_t i = 0; i < rows_; i += 32)
        __builtin_prefetch(static_cast<const uint16_t *>(w.scales) + scale + i, 0, 2);
      if (w.zeros != nullptr)
        __builtin_prefetch(w.zeros + int4_zero(w.layout, w.rows, w.groups, n, of_weight).word, 0,
                           2);
    }
  }

  void add_group(const ColumnOrder::Group &group, RowRange n, int64_t first_row) {
    read_group(n, group_of_weight(group));
    words_.cols = group.places;
    words_.columns = order_.column() + group.first;
    (awq_ ? dequant_.awq_words : dequant_.gptq_words)(words_);
    ColumnsArgs args = args_of(group.first, group.places, 1);
    args.words = block_;
    args.stride = rows_;
    args.rows = n.end - n.begin;
    args.block_scales = scales_;
    args.block_zeros = zeros_;
    args.sums += n.begin - first_row;
    args.next = next_;
    args.next.words += group.first / kInt4PerWord * next_.stride;
    if (weight_.zeros != nullptr) {
      args.x_sums = x_sums_ + (&group - order_.begin());
      args.x_sums_stride = order_.end() - order_.begin();
    }
    kernels_.block_columns(args);
  }

  void read_group(RowRange n, int64_t group) {
    const int64_t rows = n.end - n.begin;
    if (weight_.layout != NF4_INT4_COMPRESSED_TENSORS)
      return dequant_.groups(int4_groups(weight_, n.begin, group, rows, scales_, zeros_));
    for (int64_t i = 0; i < rows; ++i)
      dequant_.groups(int4_groups(weight_, n.begin + i, group, 1, scales_ + i, zeros_ + i));
  }

  static constexpr int64_t kGathered = 1024;  // in elements, whole steps

  const DequantKernels &dequant_;
  const bool awq_;
  const int64_t columns_;
  const int64_t rows_;  // rows of the weight
  Ahead next_{};
  int64_t prepared_k_ = -1;
  int64_t prepared_m_ = -1;
  WordsArgs words_{};
  float x_sums_[kMaxXSums];
  float scales_[kVectorRows + 16];
  float zeros_[kVectorRows + 16];
  alignas(64) uint32_t block_[kBlockWords];
  ColumnOrder order_;
  // These are used one after the other.
  union {
    int16_t sorted_[ColumnOrder::kMaxColumns];
    alignas(64) char gathered_[kGathered * sizeof(float)];
    alignas(64) uint32_t rows_of_words_[kCodes / kInt4PerWord];
  };
};

}  // namespace

void matmul_sorted_columns(const DequantKernels &dequant, const MatmulKernels &kernels,
                           const Int4MatmulProblem &problem, RowRange n) {
  SortedColumnsMultiplier(dequant, kernels, problem)(n);
}

}  // namespace nf4::cpu
