#include "cpu/matmul/column_order.hpp"

#include <algorithm>
#include <numeric>

#include "core/int4.hpp"
#include "cpu/weight/int4.hpp"

namespace nf4::cpu {

void ColumnOrder::assign(const Int4Weight &weight, int64_t k, int64_t columns, int64_t places,
                         int16_t *sorted) {
  places = std::min(places, kMaxPlaces);
  columns_ = std::min({weight.cols - k, columns, places});
  for (;;) {
    sort(weight, k, sorted);
    if (try_assign(weight, k, places, sorted)) return;
    columns_ = columns_ * 3 / 4 / kInt4PerWord * kInt4PerWord;
  }
}

// Sorts by group, digit by digit.
void ColumnOrder::sort(const Int4Weight &weight, int64_t k, int16_t *sorted) {
  constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;
  std::iota(sorted, sorted + columns_, int16_t{0});
  for (int shift = 0; (weight.groups - 1) >> shift > 0; shift += kDigitBits) {
    const auto digit = [&](int16_t column) {
      return int4_group(weight, k + column) >> shift & (kDigits - 1);
    };
    int16_t next[kDigits + 1] = {};
    for (int64_t i = 0; i < columns_; ++i) ++next[digit(sorted[i]) + 1];
    std::partial_sum(next, next + kDigits, next);
    std::copy_n(sorted, columns_, column_);
    for (int64_t i = 0; i < columns_; ++i) sorted[next[digit(column_[i])]++] = column_[i];
  }
}

// Returns false if the columns do not have room.
bool ColumnOrder::try_assign(const Int4Weight &weight, int64_t k, int64_t places,
                             const int16_t *sorted) {
  groups_ = 0;
  places_ = 0;
  for (int64_t i = 0; i < columns_;) {
    const int64_t group = int4_group(weight, k + sorted[i]);
    const int64_t most = std::min(columns_, i + kMaxGroupPlaces);
    int64_t end = i + 1;
    while (end < most && int4_group(weight, k + sorted[end]) == group) ++end;
    const int64_t count = int4_words(end - i) * kInt4PerWord;
    if (places_ + count > places) return false;
    std::copy(sorted + i, sorted + end, column_ + places_);
    std::fill(column_ + places_ + end - i, column_ + places_ + count, int16_t{-1});
    list_[groups_++] = {static_cast<int16_t>(places_), static_cast<int16_t>(count)};
    places_ += count;
    i = end;
  }
  return true;
}

}  // namespace nf4::cpu
