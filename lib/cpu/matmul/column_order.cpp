#include "cpu/matmul/column_order.hpp"

#include <algorithm>
#include <numeric>

#include "core/int4.hpp"
#include "cpu/weight/int4.hpp"

namespace nf4::cpu {

void ColumnOrder::take(const Int4Weight &weight, int64_t k, int64_t columns, int64_t places) {
  places = std::min(places, kMaxPlaces);
  columns_ = std::min({weight.cols - k, columns, places});
  for (;;) {
    sort(weight, k);
    if (place(weight, k, places)) return;
    columns_ = columns_ * 3 / 4 / kInt4PerWord * kInt4PerWord;
  }
}

// By group, digit by digit.
void ColumnOrder::sort(const Int4Weight &weight, int64_t k) {
  constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;
  std::iota(sorted_, sorted_ + columns_, int16_t{0});
  for (int shift = 0; (weight.groups - 1) >> shift > 0; shift += kDigitBits) {
    const auto digit = [&](int16_t column) {
      return int4_group(weight, k + column) >> shift & (kDigits - 1);
    };
    int64_t next[kDigits + 1] = {};
    for (int64_t i = 0; i < columns_; ++i) ++next[digit(sorted_[i]) + 1];
    std::partial_sum(next, next + kDigits, next);
    std::copy_n(sorted_, columns_, column_);
    for (int64_t i = 0; i < columns_; ++i) sorted_[next[digit(column_[i])]++] = column_[i];
  }
}

// False where they do not have room.
bool ColumnOrder::place(const Int4Weight &weight, int64_t k, int64_t places) {
  groups_ = 0;
  places_ = 0;
  for (int64_t i = 0; i < columns_;) {
    const int64_t group = int4_group(weight, k + sorted_[i]);
    const int64_t most = std::min(columns_, i + kMaxGroupPlaces);
    int64_t end = i + 1;
    while (end < most && int4_group(weight, k + sorted_[end]) == group) ++end;
    const int64_t count = int4_words(end - i) * kInt4PerWord;
    if (places_ + count > places) return false;
    std::copy(sorted_ + i, sorted_ + end, column_ + places_);
    std::fill(column_ + places_ + end - i, column_ + places_ + count, int16_t{-1});
    list_[groups_++] = {group, static_cast<int32_t>(places_), static_cast<int32_t>(count)};
    places_ += count;
    i = end;
  }
  return true;
}

}  // namespace nf4::cpu
