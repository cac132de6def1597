// Matmul on the CPU with rows of x whose numbers are alike or differ much, against binary64: some
// variants make integers of x.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/int4.hpp"
#include "cpu/dtypes.hpp"
#include "support/cpu_matmul.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

// kBesideZeros, kFarBesideZeros: columns with large numbers in x have the number 0 in all rows of
// the weight, so that errors of other columns show.
enum class Numbers { kNormal, kConstant, kHeavyTailed, kWide, kBesideZeros, kFarBesideZeros };
constexpr Numbers kAll[] = {Numbers::kNormal, Numbers::kConstant,    Numbers::kHeavyTailed,
                            Numbers::kWide,   Numbers::kBesideZeros, Numbers::kFarBesideZeros};
constexpr int64_t kZeroStep = 40;

// Long rows end in part of a unit, and their columns are multiplied in several parts.
constexpr MatmulShape kShapes[] = {{21, 7264, 1}, {6, 192, 1},   {5, 352, 3},  {9, 96, 1},
                                   {35, 2208, 6}, {18, 160, 21}, {16, 320, 70}};

bool has_zeros(Numbers numbers) {
  return numbers == Numbers::kBesideZeros || numbers == Numbers::kFarBesideZeros;
}

float number(Rng &rng, Numbers numbers, int64_t column) {
  switch (numbers) {
    case Numbers::kConstant:
      return 0.7f;
    case Numbers::kHeavyTailed:
      return rng.normal() / (rng.uniform() + 1e-3f);
    case Numbers::kWide:
      return std::ldexp(rng.normal(), static_cast<int>(rng.between(-20, 10)));
    case Numbers::kBesideZeros:
      return (column % kZeroStep == 0 ? 4e3f : 1.0f) * rng.normal();
    case Numbers::kFarBesideZeros:
      return (column % kZeroStep == 0 ? 2e4f : 1e-6f) * rng.normal();
    default:
      return rng.normal();
  }
}

// Gives every kZeroStep-th column the number 0.
void set_zeros(HostWeight &weight) {
  constexpr int kZero = 7;  // of NF4
  for (int64_t row = 0; row < weight.shape.rows; ++row)
    for (int64_t k = 0; k < weight.shape.cols; k += kZeroStep) {
      const int64_t element = row * weight.shape.cols + k;
      const int shift = element % 2 == 0 ? 4 : 0;
      uint8_t &byte = weight.bytes[kPacked][element / 2];
      byte = static_cast<uint8_t>((byte & ~(15 << shift)) | kZero << shift);
    }
}
void set_zeros(HostInt4Weight &weight) {
  const nf4_int4_tensor &shape = weight.shape;
  auto *words = reinterpret_cast<uint32_t *>(weight.bytes[kInt4Packed].data());
  for (int64_t row = 0; row < shape.rows; ++row)
    for (int64_t k = 0; k < shape.cols; k += kZeroStep) {
      const Int4Place place = int4_code(shape.layout, shape.rows, shape.cols, row, k);
      words[place.word] = (words[place.word] & ~(15u << place.shift)) | kInt4SymmetricZero
                                                                            << place.shift;
    }
}

template <class Host>
void set_x(MatmulCaseOf<Host> &test, Rng &rng, Numbers numbers) {
  cpu::with_dtype(test.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t m = 0; m < test.m; ++m)
      for (int64_t k = 0; k < test.weight.shape.cols; ++k)
        reinterpret_cast<T *>(test.x.data())[m * test.x_stride + k] =
            from_float<T>(number(rng, numbers, k));
  });
}

template <class Host>
void check_numbers(MatmulCaseOf<Host> test, Rng &rng, Numbers numbers) {
  INFO("numbers " << static_cast<int>(numbers));
  if (has_zeros(numbers)) set_zeros(test.weight);
  set_x(test, rng, numbers);
  check_matmul(test, rng);
}

// NF4's codes in blocks of 64, with a caller's codebook.
nf4_tensor codes_of(int64_t rows, int64_t cols, std::vector<uint8_t> &packed,
                    std::vector<float> &absmax, const float *codebook) {
  nf4_tensor weight{};
  weight.struct_size = sizeof weight;
  weight.format = NF4_FORMAT_NF4;
  weight.blocksize = 64;
  weight.rows = rows;
  weight.cols = cols;
  weight.packed = packed.data();
  weight.absmax = absmax.data();
  weight.codebook = codebook;
  return weight;
}

// m rows of x, and of y, next to each other.
nf4_matmul_args args_of(const std::vector<BFloat16> &x, std::vector<BFloat16> &y, int m) {
  nf4_matmul_args args{};
  args.struct_size = sizeof args;
  args.dtype = NF4_DTYPE_BF16;
  args.m = m;
  args.x = x.data();
  args.x_stride = static_cast<int64_t>(x.size()) / m;
  args.y = y.data();
  args.y_stride = static_cast<int64_t>(y.size()) / m;
  return args;
}

// Every variant's y, for rows of x that are next to each other, is this number everywhere.
template <int M, int Rows, class Multiply>
void check_all(const std::vector<BFloat16> &x, float expected, Multiply multiply) {
  for (const cpu::Variant &variant : cpu::variants()) {
    if (!variant.supported()) continue;
    const ForcedVariant forced(variant);
    std::vector<BFloat16> y(M * Rows);
    const nf4_matmul_args args = args_of(x, y, M);
    INFO(variant.name);
    REQUIRE(multiply(args) == NF4_STATUS_OK);
    for (const BFloat16 each : y) CHECK(to_float(each) == expected);
  }
}

}  // namespace

TEST_CASE("rows of x with numbers of any magnitudes are multiplied", "[matmul][accuracy]") {
  uint64_t stream = 0x49000000;
  for (const nf4_dtype dtype : kDtypes)
    for (const MatmulShape &shape : kShapes)
      for (const Numbers numbers : kAll) {
        Rng rng(++stream);
        const CaseClass kind{dtype, rng.pick({32, 64}), rng.one_in(2)};
        const MatmulCase test =
            random_matmul_case(rng, kind, CodebookKind::kNf4, shape, XKind::kOrdinary);
        INFO(describe(test, stream));
        check_numbers(test, rng, numbers);
      }
}

TEST_CASE("rows of x with numbers of any magnitudes are multiplied with integers",
          "[matmul][accuracy]") {
  uint64_t stream = 0x4a000000;
  for (const nf4_dtype dtype : kDtypes)
    for (const MatmulShape &shape : kShapes)
      for (const Numbers numbers : kAll) {
        Rng rng(++stream);
        // Zero points would make other numbers of the code.
        const bool zeros = !has_zeros(numbers) && rng.one_in(2);
        const Int4Class kind{NF4_INT4_COMPRESSED_TENSORS, NF4_DTYPE_BF16, zeros, 0};
        const Int4MatmulCase test = random_int4_matmul_case(rng, kind, {shape.rows, shape.cols, 32},
                                                            dtype, shape.m, XKind::kOrdinary, true);
        INFO(describe(test, stream));
        check_numbers(test, rng, numbers);
      }
}

TEST_CASE("rows of x with numbers of any magnitudes are multiplied with words of integers",
          "[matmul][accuracy]") {
  constexpr Int4Shape kWordShapes[] = {{40, 352, 32}, {136, 320, 64}, {72, 72, 72}, {16, 384, 128}};
  uint64_t stream = 0x4b000000;
  for (const nf4_int4_layout layout : {NF4_INT4_GPTQ, NF4_INT4_AWQ})
    for (const Int4Shape &shape : kWordShapes)
      for (const Numbers numbers : kAll) {
        if (has_zeros(numbers)) continue;
        Rng rng(++stream);
        const Int4Class kind{layout, NF4_DTYPE_BF16, rng.one_in(2), 0};
        const int64_t m = rng.pick({5, 7, 21, 70});
        const Int4MatmulCase test =
            random_int4_matmul_case(rng, kind, shape, NF4_DTYPE_BF16, m, XKind::kOrdinary, true);
        INFO(describe(test, stream));
        check_numbers(test, rng, numbers);
      }
}

TEST_CASE("a sum is finite if it is with the codebook's own entries", "[matmul][accuracy]") {
  struct Magnitudes {
    float codebook, x, absmax;
  };
  constexpr int kRows = 4, kCols = 256;
  for (const Magnitudes &of : {Magnitudes{0x1p-50f, 0x1p120f, 1000},
                               {0x1p50f, 0x1p-120f, 0x1p-35f},
                               {0x1p-20f, 0x1p-100f, 0x1p100f},
                               {0x1p30f, 0x1p80f, 0x1p-60f}})
    for (const int m : {1, 6})
      for (const cpu::Variant &variant : cpu::variants()) {
        if (!variant.supported()) continue;
        const ForcedVariant forced(variant);
        float codebook[16];
        for (int i = 0; i < 16; ++i)
          codebook[i] = (static_cast<float>(i) - 7.5f) / 7.5f * of.codebook;
        std::vector<uint8_t> packed(kRows * kCols / 2, 0xff);
        std::vector<float> absmax(kRows * kCols / 64, of.absmax);
        const std::vector<BFloat16> x(m * kCols, from_float<BFloat16>(of.x));
        std::vector<BFloat16> y(m * kRows);
        const nf4_tensor weight = codes_of(kRows, kCols, packed, absmax, codebook);
        const nf4_matmul_args args = args_of(x, y, m);
        INFO(variant.name << ", codebook times " << of.codebook);
        REQUIRE(nf4_matmul_cpu(&weight, &args, 1) == NF4_STATUS_OK);
        const double exact = double{kCols} * of.codebook * of.x * of.absmax;
        for (const BFloat16 each : y) CHECK(std::fabs(to_float(each) - exact) <= 0x1p-7 * exact);
      }
}

// In fp32 a number of x times the factor of these entries overflows, and 0 times that is NaN.
TEST_CASE("large numbers of x times entries of 0 are 0", "[matmul][accuracy]") {
  constexpr int kRows = 8, kCols = 64, kM = 6;
  float codebook[16];
  for (int i = 0; i < 16; ++i) codebook[i] = 2.0f * static_cast<float>(i - 8);
  std::vector<uint8_t> packed(kRows * kCols / 2, 0x88);
  std::vector<float> absmax(kRows, 1.0f);
  std::vector<BFloat16> x(kM * kCols, from_float<BFloat16>(1.0f));
  for (int i = 0; i < kM; ++i) x[i * kCols + 3] = from_float<BFloat16>(2.5e38f);
  const nf4_tensor weight = codes_of(kRows, kCols, packed, absmax, codebook);
  check_all<kM, kRows>(
      x, 0.0f, [&](const nf4_matmul_args &args) { return nf4_matmul_cpu(&weight, &args, 1); });
}

TEST_CASE("the last group of integers may have an infinite scale", "[matmul][accuracy]") {
  constexpr int kRows = 64, kCols = 96, kGroups = 3, kM = 6;
  constexpr uint16_t kOne = 0x3c00, kInfinity = 0x7c00;  // fp16
  std::vector<uint32_t> packed(kRows * kCols / 8, 0x99999999);
  const std::vector<BFloat16> x(kM * kCols, from_float<BFloat16>(1.0f));
  for (const nf4_int4_layout layout : {NF4_INT4_GPTQ, NF4_INT4_AWQ}) {
    std::vector<uint16_t> scales(kGroups * kRows, kOne);
    std::fill(scales.end() - kRows, scales.end(), kInfinity);
    nf4_int4_tensor weight{};
    weight.struct_size = sizeof weight;
    weight.layout = layout;
    weight.scales_dtype = NF4_DTYPE_FP16;
    weight.group_size = kCols / kGroups;
    weight.rows = kRows;
    weight.cols = kCols;
    weight.packed = packed.data();
    weight.scales = scales.data();
    check_all<kM, kRows>(
        x, std::numeric_limits<float>::infinity(),
        [&](const nf4_matmul_args &args) { return nf4_int4_matmul_cpu(&weight, &args, 1); });
  }
}

namespace {

// Rows of x with two numbers so far apart that the smaller one underflows beside the other, which
// meets elements of 0. `element` is an element of the weight.
template <class Multiply, class Element>
void check_far_apart(int m, int64_t rows, int64_t cols, Multiply multiply, Element element) {
  constexpr float kLarge = 1e30f;
  for (const float small : {1e-25f, 1e-20f}) {
    std::vector<BFloat16> x(m * cols);
    for (int64_t i = 0; i < m * cols; ++i) {
      const float number = (1 + static_cast<float>(i % 7) / 8) * small;
      x[i] = from_float<BFloat16>(i % cols % kZeroStep == 0 ? kLarge : number);
    }
    std::vector<BFloat16> y(m * rows);
    const nf4_matmul_args args = args_of(x, y, m);
    REQUIRE(multiply(args) == NF4_STATUS_OK);
    for (int64_t i = 0; i < m * rows; ++i) {
      double exact = 0, magnitude = 0;
      for (int64_t k = 0; k < cols; ++k) {
        const double term =
            element(i % rows, k) * static_cast<double>(to_float(x[i / rows * cols + k]));
        exact += term;
        magnitude += std::fabs(term);
      }
      if (std::fabs(to_float(y[i]) - exact) <= 2.01 * kBf16Unit * magnitude) continue;
      FAIL("y[" << i / rows << "][" << i % rows << "] is " << to_float(y[i]) << ", expected "
                << exact << ", beside " << small);
    }
  }
}

}  // namespace

TEST_CASE("small numbers of x count beside large ones that meet elements of 0",
          "[matmul][accuracy]") {
  constexpr int64_t kRows = 16;
  Rng rng(0x4c000000);
  for (const cpu::Variant *variant : supported_variants())
    for (const int m : {1, 6, 70})
      for (const int64_t cols : {64, 192, 352}) {
        const ForcedVariant forced(*variant);
        INFO("variant " << variant->name << ", m " << m << ", cols " << cols);
        MatmulCase test = plain_matmul_case(rng, {NF4_DTYPE_BF16, 32, false}, {kRows, cols, m});
        set_zeros(test.weight);
        const PlacedWeight placed(rng, test.weight);
        const nf4_tensor tensor = placed.tensor();
        std::vector<float> elements(kRows * cols);
        REQUIRE(nf4_dequant_cpu(&tensor, elements.data(), NF4_DTYPE_FP32, 1) == NF4_STATUS_OK);
        check_far_apart(
            m, kRows, cols,
            [&](const nf4_matmul_args &args) { return nf4_matmul_cpu(&tensor, &args, 1); },
            [&](int64_t n, int64_t k) { return double{elements[n * cols + k]}; });
      }
}

TEST_CASE("small numbers of x count beside large ones that meet integers of 0",
          "[matmul][accuracy]") {
  constexpr int64_t kRows = 16;
  Rng rng(0x4d000000);
  for (const cpu::Variant *variant : supported_variants())
    for (const nf4_int4_layout layout : kInt4Layouts)
      for (const int m : {1, 6, 70})
        for (const Int4Shape &shape : {Int4Shape{kRows, 16, -1},
                                       {kRows, 64, 16},
                                       {kRows, 96, 8},
                                       {kRows, 192, 32},
                                       {kRows, 352, -1}}) {
          const ForcedVariant forced(*variant);
          INFO("variant " << variant->name << ", layout " << layout << ", m " << m << ", cols "
                          << shape.cols << ", groups of " << shape.group_size);
          HostInt4Weight weight =
              random_int4_weight(rng, {layout, NF4_DTYPE_BF16, false, 0}, shape, true);
          set_zeros(weight);
          const std::vector<float> elements = int4_elements(weight);
          const nf4_int4_tensor tensor = weight.in_place();
          check_far_apart(
              m, kRows, shape.cols,
              [&](const nf4_matmul_args &args) { return nf4_int4_matmul_cpu(&tensor, &args, 1); },
              [&](int64_t n, int64_t k) { return double{elements[n * shape.cols + k]}; });
        }
}
