// Random products of experts: a weight, rows of x, and the assignment of rows of y to experts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "support/matmul_cases.hpp"
#include "support/matmul_expected.hpp"

namespace nf4::test {

// The number of rows of y that each expert has. kAny: any. kFew: some experts have all rows. kOne:
// one expert has all. kPartial: rows at the end belong to no expert, or no rows belong to one.
// kBad: ends decrease, are negative or beyond m.
enum class Routing { kAny, kFew, kOne, kPartial, kBad };
constexpr Routing kRoutings[] = {Routing::kAny, Routing::kFew, Routing::kOne, Routing::kPartial,
                                 Routing::kBad};

struct GroupedShape {
  int32_t experts;
  int64_t n, k, m;
};

// The assignment of rows of y and x to experts.
struct GroupedRows {
  GroupedShape shape;
  int64_t x_rows;
  std::vector<int32_t> ends;
  std::vector<int32_t> x_index;  // some of them out of range; empty: none
  std::vector<float> row_scale;  // empty: none

  // The expert of a row of y, or -1.
  int32_t expert_of(int64_t row) const;
  // The row of x for a row of y, or -1 for zeros.
  int64_t x_row_of(int64_t row) const;
};
GroupedRows random_grouped_rows(Rng &rng, const GroupedShape &shape, Routing routing);

struct GroupedCase : GroupedRows {
  MatmulCase all;  // the weight of all experts, as one with all of x
  int64_t y_stride;
  int64_t bias_stride;
  std::vector<uint8_t> bias;  // [E][bias_stride]; empty: none

  size_t y_bytes() const;
};

// E, N, K and m such that experts begin with a block, small enough for a naive reference.
GroupedShape random_grouped_shape(Rng &rng, int blocksize);

// With `plain`, ordinary numbers and scales of about 1, otherwise anything.
GroupedCase random_grouped_case(Rng &rng, const CaseClass &kind, const GroupedShape &shape,
                                Routing routing, bool plain);

// The expected y[row][n] of a row that has an expert.
Expected expect(const GroupedCase &test, const nf4_tensor &weight, int64_t row, int64_t n);

// Addresses of memory with the case's contents.
struct GroupedAddresses {
  const void *x, *bias, *ends, *x_index, *row_scale;
  void *y;
};
nf4_grouped_args grouped_args(const GroupedCase &test, const GroupedAddresses &at);

// A caller's codebook, as a part of a weight: 15 numbers in [-1, 1] after the first.
std::vector<uint8_t> random_own_codebook(Rng &rng, float first);

std::string describe(const GroupedRows &rows);
std::string describe(const GroupedCase &test, uint64_t stream);

}  // namespace nf4::test
