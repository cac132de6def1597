// Dequantizes rows of an integer weight, part by part, in the order of its stored columns.
#pragma once

#include "cpu/dequant/kernels.hpp"
#include "cpu/ranges.hpp"
#include "problem.hpp"

namespace nf4::cpu {

class Int4Rows {
 public:
  // The most rows of one load(); a load begins at a multiple of 8. Where groups are not whole
  // steps, it is the number of rows that may each have tables of their groups' values.
  int64_t max_rows() const;
  // The most stored columns for a number of rows. They begin at a multiple of kKernelStep.
  int64_t max_columns(int64_t rows) const;

  // Makes the codes of these rows and columns accessible.
  void load(RowRange n, int64_t k, int64_t columns);
  // Announces the codes of the next load(): they are prefetched while these rows are dequantized.
  void expect(RowRange n, int64_t k, int64_t columns);
  // Dequantizes row n: `count` of the loaded columns from column k, a multiple of kKernelStep, on;
  // then writes zeros up to a whole kKernelStep.
  void operator()(int64_t n, int64_t k, int64_t count, char *out);

 protected:
  static constexpr int64_t max_groups(int64_t code_bytes) {
    return code_bytes * 2 / kKernelStep + 16;
  }

  // The buffers have room for `code_bytes` of codes, for the scales and zeros of their groups, and
  // for `table_bytes` of tables.
  Int4Rows(const DequantKernels &kernels, const Int4Weight &weight, nf4_dtype dtype,
           int64_t code_bytes, uint8_t *codes, float *scales, float *zeros, int64_t table_bytes,
           char *tables);

 private:
  static constexpr int64_t kMaxColumns = 4096;

  // How elements are made: by whole steps within a group; by a look-up for each, in a table of 16
  // values for each group of a row; or, with too many groups for tables, by the reference's decode.
  enum class Decode { kSteps, kTables, kReference };

  // The words of some rows and columns, in rows of `bytes`.
  struct Words {
    const char *first;
    int64_t stride;  // in bytes
    int64_t rows;
    int64_t bytes;
  };

  bool in_steps() const;
  Decode decode_of(int64_t rows, int64_t groups) const;
  void read_groups(RowRange n);
  Words words(RowRange n, int64_t k, int64_t columns) const;
  void prefetch();
  void dequant_steps(const uint8_t *codes, int64_t n, int64_t k, int64_t count, char *out);
  void make_tables(int64_t n);
  template <class T>
  void look_up(const uint8_t *codes, int64_t k, int64_t count, T *out) const;

  const DequantKernels &kernels_;
  const Int4Weight &weight_;
  const nf4_dtype dtype_;
  const int64_t element_bytes_;
  // Rows of codes; the first is row n_ from column k_ on.
  const uint8_t *codes_ = nullptr;
  int64_t stride_ = 0;
  int64_t n_ = 0;
  int64_t k_ = 0;
  int64_t n_count_ = 0;
  Words next_{};
  int64_t next_row_ = 0;
  int64_t next_byte_ = 0;
  int64_t lines_per_row_ = 0;  // lines that are prefetched while a row is dequantized
  Decode decode_ = Decode::kReference;
  // Scales and zeros of the rows' groups, from group_ on; for compressed-tensors, those of one row.
  int64_t group_ = 0;
  int64_t groups_ = 0;
  const int64_t code_bytes_;
  uint8_t *const buffer_;
  float *const scales_;
  float *const zeros_;
  const int64_t table_bytes_;
  char *const tables_;  // values of one row, in its dtype
};

// Int4Rows together with its buffers.
template <int64_t kCodeBytes, int64_t kTableBytes>
class Int4RowsOf : public Int4Rows {
 public:
  Int4RowsOf(const DequantKernels &kernels, const Int4Weight &weight, nf4_dtype dtype)
      : Int4Rows(kernels, weight, dtype, kCodeBytes, codes_, scales_, zeros_, kTableBytes,
                 tables_) {}

 private:
  float scales_[max_groups(kCodeBytes)];
  float zeros_[max_groups(kCodeBytes)];
  alignas(64) uint8_t codes_[kCodeBytes];
  alignas(64) char tables_[kTableBytes];
};

}  // namespace nf4::cpu
