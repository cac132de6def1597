// Stored columns of an integer weight in the order of their groups. columns.cpp multiplies them in
// this order if g_idx scatters a group.
#pragma once

#include <cstdint>

#include "problem.hpp"

namespace nf4::cpu {

class ColumnOrder {
 public:
  // The most columns at once, and the most places. A group begins a word, so some places have no
  // column.
  static constexpr int64_t kMaxColumns = 4096;
  static constexpr int64_t kMaxPlaces = 4608;
  static constexpr int64_t kMaxGroupPlaces = 128;

  // The columns of a group, from a place on: all that have places, or as many as can be together.
  struct Group {
    int16_t first;
    int16_t places;  // whole words
  };

  // Assigns places to the columns from k on: to at most `columns` of them, and to as many as have
  // room. `sorted` is scratch for kMaxColumns.
  void assign(const Int4Weight &weight, int64_t k, int64_t columns, int64_t places,
              int16_t *sorted);

  int64_t columns() const { return columns_; }
  int64_t places() const { return places_; }
  const Group *begin() const { return list_; }
  const Group *end() const { return list_ + groups_; }
  // The column of each place; negative if a place has none.
  const int16_t *column() const { return column_; }

 private:
  void sort(const Int4Weight &weight, int64_t k, int16_t *sorted);
  bool try_assign(const Int4Weight &weight, int64_t k, int64_t places, const int16_t *sorted);

  int64_t columns_ = 0;
  int64_t places_ = 0;
  int groups_ = 0;
  int16_t column_[kMaxPlaces];
  Group list_[kMaxPlaces / 8];
};

}  // namespace nf4::cpu
