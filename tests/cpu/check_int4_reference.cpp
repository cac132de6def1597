// The scalar reference of integer weights against nf4.h's rules, written anew and naively.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "nf4/nf4.h"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/force.hpp"
#include "support/int4_cases.hpp"
#include "support/matmul_cases.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

constexpr int kShapes = 12;  // per class

// An integer weight by its rules: one number at a time, by rows and columns as they are stored.
struct Naive {
  const nf4_int4_tensor &weight;
  int64_t n = weight.rows, k = weight.cols;
  int64_t group_size = weight.group_size == -1 ? k : weight.group_size;
  int64_t groups = k == 0 ? 0 : k / group_size;

  static int nibble(const void *words, int64_t word, int i) {
    return static_cast<const uint8_t *>(words)[word * 4 + i / 2] >> (i % 2 * 4) & 15;
  }
  // Where AWQ has row `row` of a word.
  static int awq(int64_t row) {
    constexpr int kOrder[] = {0, 2, 4, 6, 1, 3, 5, 7};
    return static_cast<int>(std::find(kOrder, kOrder + 8, row % 8) - kOrder);
  }
  int code(int64_t row, int64_t col) const {
    const int i = static_cast<int>(col % 8);
    if (weight.layout == NF4_INT4_GPTQ) return nibble(weight.packed, col / 8 * n + row, i);
    if (weight.layout == NF4_INT4_AWQ)
      return nibble(weight.packed, col * (n / 8) + row / 8, awq(row));
    return nibble(weight.packed, row * ((k + 7) / 8) + col / 8, i);
  }
  // Of the word as it is after zero_offset, which carries from a zero to the next.
  int zero_of_word(int64_t word, int i) const {
    const auto stored = static_cast<const uint32_t *>(weight.zeros)[word];
    const uint32_t zeros = stored + (weight.zero_offset == 1 ? 0x11111111u : 0);
    return static_cast<int>(zeros >> 4 * i) & 15;
  }
  int zero(int64_t row, int64_t g) const {
    if (weight.zeros == nullptr) return 8;
    const int i = static_cast<int>(row % 8);
    if (weight.layout == NF4_INT4_GPTQ) return zero_of_word(g * ((n + 7) / 8) + row / 8, i);
    if (weight.layout == NF4_INT4_AWQ) return zero_of_word(g * (n / 8) + row / 8, awq(row));
    return zero_of_word(row / 8 * groups + g, i);
  }
  double scale(int64_t row, int64_t g) const {
    const bool by_row = weight.layout == NF4_INT4_COMPRESSED_TENSORS;
    return read_number(weight.scales_dtype, weight.scales, by_row ? row * groups + g : g * n + row);
  }
  int64_t group(int64_t col) const {
    return weight.g_idx != nullptr ? weight.g_idx[col] : col / group_size;
  }
  int64_t column(int64_t col) const {
    return weight.permutation != nullptr ? weight.permutation[col] : col;
  }
};

std::vector<double> decode(const nf4_int4_tensor &weight) {
  const Naive naive{weight};
  std::vector<double> values(weight.rows * weight.cols);
  for (int64_t row = 0; row < weight.rows; ++row)
    for (int64_t col = 0; col < weight.cols; ++col) {
      const int64_t g = naive.group(col);
      values[row * weight.cols + naive.column(col)] =
          naive.scale(row, g) * (naive.code(row, col) - naive.zero(row, g));
    }
  return values;
}

bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

// The largest finite number of a dtype of scales, and the smallest positive one.
double largest(nf4_dtype dtype) { return dtype == NF4_DTYPE_FP16 ? 65504 : 0x1.fep127; }
double smallest(nf4_dtype dtype) { return dtype == NF4_DTYPE_FP16 ? 0x1p-24 : 0x1p-133; }

double scale_of(float exact, nf4_dtype dtype) {
  const double rounded = std::isinf(exact) ? INFINITY : round_to(dtype, exact);
  return rounded == 0 ? smallest(dtype) : std::min(rounded, largest(dtype));
}

float clamp15(float x) { return std::min(15.0f, std::max(0.0f, x)); }

// Whether a group of a quantized row is what the rule says of x.
void check_group(const nf4_int4_tensor &weight, bool symmetric, const std::vector<float> &x,
                 int64_t row, int64_t g) {
  const Naive naive{weight};
  float low = 0, high = 0;
  for (const float value : x)
    if (std::isfinite(value)) {
      low = std::min(low, value);
      high = std::max(high, value);
    }
  const float absmax = std::max(-low, high);
  volatile float span = symmetric ? 2 * absmax : high - low;
  volatile float exact = span / 15;
  const auto s = static_cast<float>(scale_of(exact, weight.scales_dtype));
  REQUIRE(naive.scale(row, g) == s);
  volatile float from_low = -low / s;
  const float z = symmetric ? 8 : clamp15(std::nearbyint(from_low));
  REQUIRE(naive.zero(row, g) == z);
  for (size_t i = 0; i < x.size(); ++i) {
    volatile float quotient = x[i] / s;
    const float q = std::isnan(x[i]) ? z : clamp15(std::nearbyint(quotient) + z);
    const int code = naive.code(row, g * naive.group_size + static_cast<int64_t>(i));
    if (static_cast<float>(code) != q)
      FAIL("q of " << x[i] << " is " << code << ", expected " << q << "; s " << s << ", z " << z);
  }
}

void check_quantized(const nf4_int4_tensor &weight, bool symmetric, nf4_dtype dtype,
                     const std::vector<uint8_t> &in) {
  const Naive naive{weight};
  std::vector<float> x(naive.group_size);
  for (int64_t row = 0; row < weight.rows; ++row)
    for (int64_t g = 0; g < naive.groups; ++g) {
      const int64_t first = row * weight.cols + g * naive.group_size;
      for (int64_t i = 0; i < naive.group_size; ++i)
        x[i] = static_cast<float>(read_number(dtype, in.data(), first + i));
      check_group(weight, symmetric, x, row, g);
    }
}

// The codes that no column has.
void check_unused_codes(const nf4_int4_tensor &weight) {
  if (weight.layout == NF4_INT4_COMPRESSED_TENSORS)
    for (int64_t row = 0; row < weight.rows; ++row)
      for (int64_t i = weight.cols; i % 8 != 0; ++i)
        REQUIRE(Naive::nibble(weight.packed, row * ((weight.cols + 7) / 8) + i / 8, i % 8) == 0);
}

// The zeros that no row has.
void check_unused_zeros(const nf4_int4_tensor &weight) {
  const int64_t groups = Naive{weight}.groups;
  if (weight.zeros == nullptr) return;
  const bool by_row = weight.layout == NF4_INT4_COMPRESSED_TENSORS;
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t i = weight.rows; i % 8 != 0; ++i)
      REQUIRE(Naive{weight}.zero_of_word(
                  by_row ? i / 8 * groups + g : g * ((weight.rows + 7) / 8) + i / 8, i % 8) == 0);
}

void check_quantize(const Int4Class &kind, const Int4Shape &shape, nf4_dtype dtype, bool symmetric,
                    const std::vector<uint8_t> &in) {
  HostInt4Weight host = empty_int4_weight(kind, shape);
  const nf4_int4_tensor weight = host.in_place();
  REQUIRE(nf4_int4_quantize_cpu(in.data(), dtype, &weight, symmetric, 1) == NF4_STATUS_OK);
  check_quantized(weight, symmetric, dtype, in);
  check_unused_codes(weight);
  check_unused_zeros(weight);
}

std::vector<uint8_t> floats(const std::vector<float> &values) {
  std::vector<uint8_t> bytes(values.size() * 4);
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

}  // namespace

TEST_CASE("the reference dequantizes integer weights as nf4.h says", "[reference]") {
  const ForcedVariant forced(scalar_variant());
  uint64_t stream = 0x10000000;
  for (const ColumnOrder order : kColumnOrders)
    for (const Int4Class &kind : int4_classes(order))
      for (int i = 0; i < cases_of(kShapes); ++i) {
        Rng rng(++stream);
        HostInt4Weight host = random_int4_weight(rng, kind, random_int4_shape(rng, kind.layout));
        INFO(describe(host, stream));
        const nf4_int4_tensor weight = host.in_place();
        const std::vector<double> expected = decode(weight);
        const nf4_dtype dtype = rng.pick(kDtypes);
        std::vector<uint8_t> out(expected.size() * dtype_bytes(dtype));
        REQUIRE(nf4_int4_dequant_cpu(&weight, out.data(), dtype, 1) == NF4_STATUS_OK);
        for (size_t j = 0; j < expected.size(); ++j) {
          const double got = read_number(dtype, out.data(), static_cast<int64_t>(j));
          const double right =
              std::isfinite(expected[j]) ? round_to(dtype, expected[j]) : expected[j];
          // An assertion for each would take most of the time.
          if (!same(got, right)) FAIL("element " << j << " is " << got << ", expected " << right);
        }
      }
}

TEST_CASE("the reference quantizes integer weights as nf4.h says", "[reference]") {
  const ForcedVariant forced(scalar_variant());
  uint64_t stream = 0x11000000;
  for (const Int4Class &kind : int4_classes())
    for (const bool symmetric : {false, true})
      for (int i = 0; i < cases_of(2 * kShapes); ++i) {
        if (!symmetric && !kind.zeros) continue;
        Rng rng(++stream);
        const Int4Shape shape = random_int4_shape(rng, kind.layout);
        const HostInt4Weight host = empty_int4_weight(kind, shape);
        INFO(describe(host, stream) << (symmetric ? ", symmetric" : ""));
        const nf4_dtype dtype = rng.pick(kDtypes);
        check_quantize(kind, shape, dtype, symmetric, random_int4_input(rng, dtype, host));
      }
}

TEST_CASE("groups at the limits are quantized as nf4.h says", "[reference]") {
  const ForcedVariant forced(scalar_variant());
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = INFINITY, kMax = std::numeric_limits<float>::max();
  const std::vector<std::vector<float>> groups = {
      {0, 0, 0, 0, 0, 0, 0, 0},
      {-0.0f, 0, 0, 0, -0.0f, 0, 0, 0},
      {kNan, kNan, kNan, kNan, kNan, kNan, kNan, kNan},
      {kInf, -kInf, kNan, 0, kInf, 0, -kInf, kNan},
      {kInf, 1, 2, 3, -kInf, kNan, -4, 0},
      {1, 2, 3, 4, 5, 6, 7, 8},           // z is 0
      {-1, -2, -3, -4, -5, -6, -7, -8},   // z is 15
      {-1e-30f, 1, 1, 1, 1, 1, 1, 1},     //
      {1e-8f, -1e-8f, 0, 0, 0, 0, 0, 0},  // s is 0 in fp16
      {1e-45f, 0, 0, 0, 0, 0, 0, 0},      // and in bf16
      {1e6f, -1e6f, 3, 0, 0, 0, 0, 0},    // s is infinite in fp16
      {kMax, -kMax, 1, 0, 0, 0, 0, 0},    // and in binary32
      {kMax, 0, 1, 0, 0, 0, 0, 0},
      {7.5f, -7.5f, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f},  // ties
  };
  const auto cols = static_cast<int64_t>(groups.size()) * 8;
  std::vector<float> row, all;
  for (const auto &group : groups) row.insert(row.end(), group.begin(), group.end());
  for (int n = 0; n < 8; ++n) {
    all.insert(all.end(), row.begin(), row.end());
    std::rotate(row.begin(), row.begin() + 8, row.end());
  }
  for (const Int4Class &kind : int4_classes())
    for (const bool symmetric : {false, true})
      if (symmetric || kind.zeros)
        check_quantize(kind, {8, cols, 8}, NF4_DTYPE_FP32, symmetric, floats(all));
}

TEST_CASE("reordered columns are sorted by group, and the weight is the same", "[reference]") {
  uint64_t stream = 0x12000000;
  for (const ColumnOrder order : {ColumnOrder::kGIdx, ColumnOrder::kAnyGIdx})
    for (const Int4Class &kind : int4_classes(order))
      for (int i = 0; i < cases_of(kShapes); ++i) {
        Rng rng(++stream);
        HostInt4Weight host = random_int4_weight(rng, kind, random_int4_shape(rng, kind.layout));
        INFO(describe(host, stream));
        const nf4_int4_tensor from = host.in_place();
        std::vector<uint8_t> packed(host.bytes[kInt4Packed].size(), 0xa5);
        std::vector<int32_t> permutation(from.cols, -1);
        nf4_int4_tensor to = from;
        to.packed = packed.data();
        to.g_idx = nullptr;
        to.permutation = permutation.data();
        REQUIRE(nf4_int4_reorder_cpu(&from, &to, rng.one_in(2) ? 1 : 3) == NF4_STATUS_OK);
        int64_t out_of_order = 0;
        for (int64_t k = 1; k < from.cols; ++k) {
          const int32_t a = permutation[k - 1], b = permutation[k];
          out_of_order +=
              !(from.g_idx[a] < from.g_idx[b] || (from.g_idx[a] == from.g_idx[b] && a < b));
        }
        REQUIRE(out_of_order == 0);
        check_unused_codes(to);
        int64_t differences = 0;
        for (int64_t n = 0; n < from.rows; ++n)
          for (int64_t k = 0; k < from.cols; ++k)
            differences += Naive{to}.code(n, k) != Naive{from}.code(n, permutation[k]);
        REQUIRE(differences == 0);
        if (order == ColumnOrder::kAnyGIdx) continue;  // whose groups are not of one size
        std::vector<float> a(from.rows * from.cols), b(a.size());
        REQUIRE(nf4_int4_dequant_cpu(&from, a.data(), NF4_DTYPE_FP32, 1) == NF4_STATUS_OK);
        REQUIRE(nf4_int4_dequant_cpu(&to, b.data(), NF4_DTYPE_FP32, 1) == NF4_STATUS_OK);
        REQUIRE(first_difference(NF4_DTYPE_FP32, a.data(), b.data(),
                                 static_cast<int64_t>(a.size())) == kNoDifference);
      }
}
