// Dequantizes rows of an integer weight, part by part, in the order of its stored columns.
#pragma once

#include "cpu/dequant/kernels.hpp"
#include "cpu/ranges.hpp"
#include "problem.hpp"

namespace nf4::cpu {

class Int4Rows {
 public:
  // Rows in one load(), from a multiple of 8 on; and stored columns, from a multiple of kKernelStep
  // on, for so many rows.
  static int64_t max_columns(const Int4Weight &weight, int64_t rows);

  Int4Rows(const DequantKernels &kernels, const Int4Weight &weight, nf4_dtype dtype);

  // Makes the codes of these rows and columns accessible.
  void load(RowRange n, int64_t k, int64_t columns);
  // The codes that the next load() is of: they are prefetched while these rows are dequantized.
  void expect(RowRange n, int64_t k, int64_t columns);
  // Of row n, of those columns `count` from column k, a multiple of kKernelStep, on; then zeros up
  // to a whole kKernelStep.
  void operator()(int64_t n, int64_t k, int64_t count, char *out);

 private:
  static constexpr int64_t kCodeBytes = 57344;
  static constexpr int64_t kMaxColumns = 4096;
  static constexpr int64_t kMaxGroups = kCodeBytes * 2 / kKernelStep + 16;

  // Words of some rows and columns: rows of `bytes`.
  struct Words {
    const char *first;
    int64_t stride;  // bytes
    int64_t rows;
    int64_t bytes;
  };

  bool in_vectors() const;
  void read_groups(RowRange n, int64_t k, int64_t columns);
  Words words(RowRange n, int64_t k, int64_t columns) const;
  void prefetch();
  void dequant_steps(const uint8_t *codes, int64_t n, int64_t k, int64_t count, char *out);

  const DequantKernels &kernels_;
  const Int4Weight &weight_;
  const nf4_dtype dtype_;
  const int64_t element_bytes_;
  // Rows of codes, the first being of row n_ from column k_ on.
  const uint8_t *codes_ = nullptr;
  int64_t stride_ = 0;
  int64_t n_ = 0;
  int64_t k_ = 0;
  int64_t n_count_ = 0;
  Words next_{};
  int64_t next_row_ = 0;
  int64_t next_byte_ = 0;
  int64_t lines_per_row_ = 0;  // to prefetch while a row is dequantized
  // Of the rows' groups from group_ on; of compressed-tensors, of one row.
  int64_t group_ = 0;
  int64_t groups_ = 0;
  float scales_[kMaxGroups];
  float zeros_[kMaxGroups];
  alignas(64) uint8_t buffer_[kCodeBytes];
};

}  // namespace nf4::cpu
