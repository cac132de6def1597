// Random integer weights in the layouts of nf4.h, and inputs to quantize, in plain host memory.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "nf4/nf4.h"
#include "support/random.hpp"

namespace nf4::test {

enum Int4Part { kInt4Packed, kInt4Scales, kInt4Zeros, kInt4GIdx, kInt4Permutation, kInt4PartCount };

// An integer weight without addresses, and the bytes of its parts; a part that it does not have is
// empty.
struct HostInt4Weight {
  using Tensor = nf4_int4_tensor;
  static constexpr int kParts = kInt4PartCount;

  nf4_int4_tensor shape;
  std::array<std::vector<uint8_t>, kInt4PartCount> bytes;

  int64_t elements() const { return shape.rows * shape.cols; }
  int64_t groups() const;
  bool has(int part) const { return !bytes[part].empty(); }
  // The alignment of its type that nf4.h requires of a part.
  static int alignment(int part) { return part == kInt4Scales ? 2 : 4; }
  // The weight whose parts are at `addresses`; NULL for a part that it does not have.
  nf4_int4_tensor at(const std::array<void *, kInt4PartCount> &addresses) const;
  // The addresses of its own bytes, which std::vector aligns for any type.
  nf4_int4_tensor in_place();
};

constexpr nf4_int4_layout kInt4Layouts[] = {NF4_INT4_GPTQ, NF4_INT4_AWQ,
                                            NF4_INT4_COMPRESSED_TENSORS};

// The order of columns that g_idx and permutation describe.
enum class ColumnOrder {
  kPlain,        // neither
  kGIdx,         // the columns of each group, of group_size each, anywhere
  kAnyGIdx,      // any group for each column
  kPermutation,  // the order that nf4_int4_reorder_launch writes
  kBoth,
};
constexpr ColumnOrder kColumnOrders[] = {ColumnOrder::kPlain, ColumnOrder::kGIdx,
                                         ColumnOrder::kAnyGIdx, ColumnOrder::kPermutation,
                                         ColumnOrder::kBoth};

struct Int4Class {
  nf4_int4_layout layout;
  nf4_dtype scales_dtype;
  bool zeros;
  int32_t zero_offset;  // 1 in GPTQ alone, with zeros
  ColumnOrder order = ColumnOrder::kPlain;
};
// Every layout, dtype of scales, and symmetric, asymmetric and (GPTQ) v1, in one order of columns.
std::vector<Int4Class> int4_classes(ColumnOrder order = ColumnOrder::kPlain);

struct Int4Shape {
  int64_t rows, cols;
  int32_t group_size;  // or -1
};
// Small shapes that the layout supports: groups from 8 columns up and of all columns, and odd rows
// and columns if it takes them.
Int4Shape random_int4_shape(Rng &rng, nf4_int4_layout layout);

// In one case of four, scales of every kind (NaN, infinite, subnormal, negative), otherwise about
// 0.01.
HostInt4Weight random_int4_weight(Rng &rng, const Int4Class &kind, const Int4Shape &shape,
                                  bool ordinary_scales = false);

// Experts with random weights of one shape; each part holds one expert after another. And one of
// the experts.
HostInt4Weight random_int4_stack(Rng &rng, const Int4Class &kind, const Int4Shape &shape,
                                 int experts);
HostInt4Weight expert_of(const HostInt4Weight &stack, int experts, int expert);

// The elements in fp32, and for each the scale times 16, which is at least |s (q - 8)| + |s (z -
// 8)|: matmul may sum the codes separately from x times the zero point.
std::vector<float> int4_elements(HostInt4Weight weight);
std::vector<float> int4_magnitudes(HostInt4Weight weight);

// A weight to quantize into: no part has contents.
HostInt4Weight empty_int4_weight(const Int4Class &kind, const Int4Shape &shape);

// The weight into which a weight with g_idx is reordered: the permutation has no contents.
HostInt4Weight sorted_shape(HostInt4Weight weight);

// An input to quantize in groups of `group_size`: blocks of all kinds, as in random_input(), and
// groups on the ties between codes.
std::vector<uint8_t> random_int4_input(Rng &rng, nf4_dtype dtype, const HostInt4Weight &weight);

// Describes the weight, for the message of a failure.
std::string describe(const HostInt4Weight &weight, uint64_t stream);

}  // namespace nf4::test
