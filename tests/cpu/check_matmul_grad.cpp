// The gradient, and adapters beside a product or its gradient, on the CPU: every variant that this
// machine runs against naive sums in binary64, with guard pages around every buffer.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/backend.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/cpu_tolerance.hpp"
#include "support/force.hpp"
#include "support/matmul_cases.hpp"
#include "support/matrix.hpp"
#include "support/placed.hpp"
#include "support/some_of.hpp"
#include "support/variants.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

constexpr int kShapes = 60;  // per dtype, flat or nested
constexpr int kThreadCounts[] = {2, 3, 7, 0};
constexpr double kUnit[] = {0x1p-24, 0x1p-11, 0x1p-8};  // by dtype
// Rounding to fp16 may err by half a subnormal; those of fp32 and bf16 are below 1e-30.
constexpr double kLeastError[] = {1e-30, 0x1p-25, 1e-30};

struct Kind {
  bool gradient;
  nf4_dtype dtype;
  bool nested;
  int rank;  // 0: no adapter
  MatmulShape shape;
};

// A product or a gradient with all that it takes.
struct Product {
  bool gradient;
  PlacedWeight weight;
  Matrix dense, x, y, a, b, p;
  float scale;
  int rank;

  Product(Rng &rng, const Kind &kind, const HostWeight &host)
      : Product(rng, kind, host, kind.shape, rng.one_in(2) ? NF4_DTYPE_FP32 : kind.dtype) {}
  Product(Rng &rng, const Kind &kind, const HostWeight &host, const MatmulShape &shape,
          nf4_dtype adapter)
      : gradient(kind.gradient),
        weight(rng, host),
        dense(rng, NF4_DTYPE_FP32, shape.rows, shape.cols, true),
        x(rng, kind.dtype, shape.m, gradient ? shape.rows : shape.cols),
        y(rng, kind.dtype, shape.m, gradient ? shape.cols : shape.rows),
        a(rng, adapter, kind.rank, shape.cols),
        b(rng, adapter, shape.rows, kind.rank),
        p(rng, kind.dtype, shape.m, kind.rank, true),
        scale(rng.one_in(4) ? -2.0f : rng.uniform()),
        rank(kind.rank) {
    for (Matrix *matrix : {&x, &a, &b}) matrix->fill(rng);
    REQUIRE(nf4_dequant_cpu(&weight.tensor(), dense.buffer.data(), NF4_DTYPE_FP32, 1) == 0);
  }

  nf4_status multiply(int threads) {
    y.buffer.poison();
    p.buffer.poison();
    const nf4_lora lora{sizeof lora, a.dtype,         rank,     scale,          0, a.buffer.data(),
                        a.stride,    b.buffer.data(), b.stride, p.buffer.data()};
    const nf4_matmul_args args{sizeof args,
                               x.dtype,
                               0,
                               x.rows,
                               x.buffer.data(),
                               x.stride,
                               nullptr,
                               y.buffer.data(),
                               y.stride,
                               rank == 0 ? nullptr : &lora};
    return (gradient ? nf4_matmul_grad_cpu : nf4_matmul_cpu)(&weight.tensor(), &args, threads);
  }
  // W[n][k] as it meets column `column` of y and `i` of x.
  double value(int64_t i, int64_t column) const {
    return gradient ? dense(i, column) : dense(column, i);
  }
};

Product random_product(Rng &rng, const Kind &kind) {
  const CaseClass of{kind.dtype, rng.pick(kBlocksizes), kind.nested};
  MatmulCase test = plain_matmul_case(rng, of, kind.shape);
  if (rng.one_in(3)) test.weight.shape.format = NF4_FORMAT_FP4;
  return Product(rng, kind, test.weight);
}

struct Sum {
  double value = 0, magnitude = 0;
  void add(double x, double relative_error = 1) {
    value += x;
    magnitude += std::fabs(x) * relative_error;
  }
};

// Within the rounding of `sum` to the dtype, and of its terms.
void check_number(nf4_dtype dtype, double got, const Sum &sum, double of_terms) {
  const double error =
      kUnit[dtype - 1] * std::fabs(sum.value) + of_terms * sum.magnitude + kLeastError[dtype - 1];
  if (!(std::fabs(got - sum.value) <= error)) {  // CHECK is slow
    INFO("got " << got << ", expected " << sum.value << " within " << error);
    FAIL();
  }
}

// The numbers of the operands. Reading each of them where it is used takes most of the time.
struct Numbers {
  std::vector<double> x, dense, a, b;

  explicit Numbers(const Product &of)
      : x(read(of.x)), dense(read(of.dense)), a(read(of.a)), b(read(of.b)) {}
  static std::vector<double> read(const Matrix &matrix) {
    std::vector<double> made;
    made.reserve(matrix.rows * matrix.cols);
    for (int64_t i = 0; i < matrix.rows; ++i)
      for (int64_t j = 0; j < matrix.cols; ++j) made.push_back(matrix(i, j));
    return made;
  }
};

void check_values(const cpu::Variant &variant, const Product &of, const Numbers &from) {
  // A bf16 weight or matrix of an adapter, or a codebook, is rounded; otherwise the sums are.
  const double of_sums = kFp32Unit * (64 + static_cast<double>(of.x.cols) / 8);
  const bool in_16_bits = in_bf16(variant, of.x.dtype);
  const double of_adapter = in_16_bits ? kBf16Unit : of_sums;
  const bool rounds = rounds_to_bf16(variant, of.x.dtype) && !of.gradient;
  const double of_terms = in_16_bits || rounds ? kBf16Unit : of_sums;
  const int64_t inner = of.x.cols, outer = of.y.cols, rank = of.rank;
  // W[n][k] as it meets column j of y and i of x, and the adapter's matrices likewise.
  const int64_t along_i = of.gradient ? outer : 1, along_j = of.gradient ? 1 : inner;
  const int64_t first_i = of.gradient ? rank : 1, first_r = of.gradient ? 1 : inner;
  const int64_t second_r = of.gradient ? outer : 1, second_j = of.gradient ? 1 : rank;
  const std::vector<double> &first = of.gradient ? from.b : from.a;
  const std::vector<double> &second = of.gradient ? from.a : from.b;
  for (int64_t m = 0; m < of.x.rows; ++m) {
    const double *const x = from.x.data() + m * inner;
    for (int64_t r = 0; r < rank; ++r) {
      Sum sum;
      for (int64_t i = 0; i < inner; ++i) sum.add(x[i] * first[i * first_i + r * first_r]);
      check_number(of.p.dtype, of.p(m, r), sum, of_adapter);
    }
    for (int64_t j = 0; j < outer; ++j) {
      Sum sum;
      for (int64_t i = 0; i < inner; ++i) sum.add(x[i] * from.dense[i * along_i + j * along_j]);
      for (int64_t r = 0; r < rank; ++r)
        sum.add(of.scale * of.p(m, r) * second[r * second_r + j * second_j], 3);
      check_number(of.y.dtype, of.y(m, j), sum, of_terms);
    }
  }
}

void check_surroundings(const Product &of) {
  CHECK(of.weight.surroundings_intact());
  for (const Matrix *matrix : {&of.x, &of.y, &of.a, &of.b, &of.p})
    CHECK(matrix->buffer.surroundings_intact());
  CHECK(of.y.gaps_untouched());
}

std::string describe(const Kind &kind, uint64_t stream) {
  return std::string(kind.gradient ? "gradient" : "product") + ", dtype " +
         std::to_string(kind.dtype) + (kind.nested ? ", nested, " : ", flat, ") +
         std::to_string(kind.shape.rows) + "x" + std::to_string(kind.shape.cols) + ", m " +
         std::to_string(kind.shape.m) + ", rank " + std::to_string(kind.rank) + ", stream " +
         std::to_string(stream);
}

// ||y - exact|| / ||exact||
double relative_error(const Product &of, const std::vector<double> &exact, bool rounded_weight) {
  double difference = 0, norm = 0;
  for (int64_t m = 0; m < of.y.rows; ++m)
    for (int64_t j = 0; j < of.y.cols; ++j) {
      double y = of.y(m, j);
      if (rounded_weight) {
        y = 0;
        for (int64_t i = 0; i < of.x.cols; ++i)
          y += of.x(m, i) * round_to(of.x.dtype, of.value(i, j));
        y = round_to(of.x.dtype, y);
      }
      const double expected = exact[m * of.y.cols + j];
      difference += (y - expected) * (y - expected);
      norm += expected * expected;
    }
  return std::sqrt(difference / norm);
}

}  // namespace

TEST_CASE("every variant's gradient and adapters are within the rounding of their sums",
          "[matmul]") {
  constexpr int kRanks[] = {0, 1, 7, 16, 33, 128};
  uint64_t stream = 0x21000000;
  for (const nf4_dtype dtype : kDtypes)
    for (const bool nested : {false, true})
      for (int i = 0; i < cases_of(kShapes); ++i) {
        Rng rng(++stream);
        Kind kind{rng.one_in(2), dtype, nested, 0, random_matmul_shape(rng)};
        // The gradient sums over rows.
        if (kind.gradient && rng.one_in(2)) std::swap(kind.shape.rows, kind.shape.cols);
        kind.rank = kind.gradient && rng.one_in(2) ? 0 : rng.pick(kRanks);
        INFO(describe(kind, stream));
        Product product = random_product(rng, kind);
        const Numbers numbers(product);
        for (const cpu::Variant *variant : supported_variants()) {
          INFO("variant " << variant->name);
          const ForcedVariant forced(*variant);
          REQUIRE(product.multiply(1) == NF4_STATUS_OK);
          check_values(*variant, product, numbers);
          check_surroundings(product);
        }
      }
}

TEST_CASE("the gradient's error is no more than that of a dense weight", "[matmul]") {
  uint64_t stream = 0x22000000;
  for (const nf4_dtype dtype : {NF4_DTYPE_FP16, NF4_DTYPE_BF16})
    for (const int64_t m : {1, 3, 40}) {
      Rng rng(++stream);
      const Kind kind{true, dtype, true, 0, {1024, 96, m}};
      INFO(describe(kind, stream));
      Product product = random_product(rng, kind);
      std::vector<double> exact(m * product.y.cols);
      for (int64_t i = 0; i < static_cast<int64_t>(exact.size()); ++i)
        for (int64_t n = 0; n < product.x.cols; ++n)
          exact[i] += product.x(i / product.y.cols, n) * product.value(n, i % product.y.cols);
      for (const cpu::Variant *variant : supported_variants()) {
        INFO("variant " << variant->name);
        const ForcedVariant forced(*variant);
        REQUIRE(product.multiply(1) == NF4_STATUS_OK);
        CHECK(relative_error(product, exact, false) <= 1.1 * relative_error(product, exact, true));
      }
    }
}

TEST_CASE("the number of threads changes no bit of a gradient or an adapter", "[matmul]") {
  uint64_t stream = 0x23000000;
  size_t kinds = 0;
  for (const bool gradient : {true, false})
    for (const nf4_dtype dtype : kDtypes)
      for (const MatmulShape shape :
           some_of<MatmulShape>({{1503, 2080, 1}, {300, 4100, 33}, {65, 700, 300}}, kinds++)) {
        Rng rng(++stream);
        const Kind kind{gradient, dtype, true, 16, shape};
        INFO(describe(kind, stream));
        Product product = random_product(rng, kind);
        for (const cpu::Variant *variant : supported_variants()) {
          if (variant->supported == scalar_variant().supported) continue;  // slow
          INFO("variant " << variant->name);
          const ForcedVariant forced(*variant);
          REQUIRE(product.multiply(1) == NF4_STATUS_OK);
          const auto y = product.y.bytes(), p = product.p.bytes();
          for (const int threads : kThreadCounts) {
            REQUIRE(product.multiply(threads) == NF4_STATUS_OK);
            CHECK(product.y.bytes() == y);
            CHECK(product.p.bytes() == p);
          }
        }
      }
}

TEST_CASE("a row of dy that is not finite affects no other", "[matmul]") {
  Rng rng(0x24000000);
  for (const nf4_dtype dtype : kDtypes)
    for (const int64_t m : {2, 7, 130}) {
      Product product = random_product(rng, {true, dtype, false, 8, {67, 352, m}});
      for (const cpu::Variant *variant : supported_variants()) {
        INFO("variant " << variant->name << ", m " << m << ", dtype " << dtype);
        const ForcedVariant forced(*variant);
        const int64_t bad = rng.below(m), column = rng.below(67);
        const auto before = static_cast<float>(product.x(bad, column));
        REQUIRE(product.multiply(1) == NF4_STATUS_OK);
        const auto clean = product.y.bytes();
        product.x.set(bad, column, NAN);
        REQUIRE(product.multiply(1) == NF4_STATUS_OK);
        product.x.set(bad, column, before);
        const int64_t bytes = dtype_bytes(dtype);
        for (int64_t row = 0; row < m; ++row) {
          const int64_t first = row * product.y.stride * bytes;
          if (row != bad)
            CHECK(std::memcmp(product.y.buffer.data() + first, &clean[first], 352 * bytes) == 0);
          else
            CHECK(std::isnan(product.y(row, 0)));
        }
      }
    }
}

TEST_CASE("empty gradients: nothing, or 0, and no product of an adapter", "[matmul]") {
  Rng rng(0x25000000);
  for (const nf4_dtype dtype : kDtypes)
    for (const MatmulShape shape :
         {MatmulShape{64, 5, 0}, MatmulShape{64, 0, 3}, MatmulShape{0, 37, 3}})
      for (const cpu::Variant *variant : supported_variants()) {
        INFO("variant " << variant->name << ", " << shape.rows << "x" << shape.cols << ", m "
                        << shape.m);
        const ForcedVariant forced(*variant);
        MatmulCase test = random_matmul_case(rng, {dtype, 64, rng.one_in(2)}, CodebookKind::kNf4,
                                             shape, XKind::kOrdinary);
        Product product(rng, {true, dtype, false, 4, shape}, test.weight);
        REQUIRE(product.multiply(1) == NF4_STATUS_OK);
        CHECK(product.p.buffer.untouched());
        for (int64_t m = 0; m < shape.m; ++m)
          for (int64_t k = 0; k < shape.cols; ++k) CHECK(product.y(m, k) == 0);
      }
}

TEST_CASE("the products of a batch have adapters of their own", "[matmul]") {
  Rng rng(0x26000000);
  for (const cpu::Variant *variant : supported_variants()) {
    INFO("variant " << variant->name);
    const ForcedVariant forced(*variant);
    Product first = random_product(rng, {false, NF4_DTYPE_BF16, true, 16, {40, 320, 3}});
    Product second = random_product(rng, {false, NF4_DTYPE_BF16, false, 0, {72, 320, 3}});
    REQUIRE(first.multiply(1) == NF4_STATUS_OK);
    REQUIRE(second.multiply(1) == NF4_STATUS_OK);
    const auto expected = first.y.bytes(), expected_second = second.y.bytes();
    first.y.buffer.poison();
    second.y.buffer.poison();
    const nf4_lora lora{sizeof lora,
                        first.a.dtype,
                        first.rank,
                        first.scale,
                        0,
                        first.a.buffer.data(),
                        first.a.stride,
                        first.b.buffer.data(),
                        first.b.stride,
                        first.p.buffer.data()};
    const auto args_of = [](Product &of, const nf4_lora *adapter) {
      return nf4_matmul_args{sizeof(nf4_matmul_args),
                             of.x.dtype,
                             0,
                             of.x.rows,
                             of.x.buffer.data(),
                             of.x.stride,
                             nullptr,
                             of.y.buffer.data(),
                             of.y.stride,
                             adapter};
    };
    const nf4_matmul_args args[] = {args_of(first, &lora), args_of(second, nullptr)};
    const nf4_tensor *const weights[] = {&first.weight.tensor(), &second.weight.tensor()};
    REQUIRE(nf4_matmul_batch_cpu(weights, args, 2, 2) == NF4_STATUS_OK);
    CHECK(first.y.bytes() == expected);
    CHECK(second.y.bytes() == expected_second);
  }
}
