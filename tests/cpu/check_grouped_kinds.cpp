// Products of experts and their gradient on the CPU, of weights of every kind: every variant
// against naive sums in binary64, with guard pages around every buffer. check_grouped.cpp has
// codebook weights of any scales.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "cpu/backend.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/cpu_tolerance.hpp"
#include "support/force.hpp"
#include "support/grouped_cases.hpp"
#include "support/matrix.hpp"
#include "support/placed.hpp"
#include "support/some_of.hpp"
#include "support/variants.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

constexpr int kShapes = 60;                            // per dtype, flat or nested
constexpr int kInt4Shapes = 8;                         // per class
constexpr float kFirstEntries[] = {1, INFINITY, NAN};  // of a caller's codebook

// Experts and what they do: elements [E][N][K], and for each the magnitude of what is summed.
struct Experts {
  std::vector<float> elements, magnitudes;  // empty until dequantize()

  virtual ~Experts() = default;
  virtual void dequantize() = 0;
  virtual bool gradient() const = 0;
  // Tells is_right whether numbers are looked up in a codebook. The gradient dequantizes.
  virtual bool has_codebook() const = 0;
  virtual nf4_status multiply(const nf4_grouped_args &args, int threads) const = 0;
  virtual bool surroundings_intact() const = 0;
};

class Codes : public Experts {
 public:
  Codes(Rng &rng, const HostWeight &host, bool gradient)
      : host_(host), weight_(rng, host_), gradient_(gradient) {}
  void dequantize() override {
    const ForcedVariant forced(scalar_variant());
    elements.resize(host_.elements());
    REQUIRE(nf4_dequant_cpu(&weight_.tensor(), elements.data(), NF4_DTYPE_FP32, 1) == 0);
    magnitudes = elements;
  }
  bool gradient() const override { return gradient_; }
  bool has_codebook() const override { return !gradient_; }
  nf4_status multiply(const nf4_grouped_args &args, int threads) const override {
    return (gradient_ ? nf4_matmul_grouped_grad_cpu : nf4_matmul_grouped_cpu)(&weight_.tensor(),
                                                                              &args, threads);
  }
  bool surroundings_intact() const override { return weight_.surroundings_intact(); }

 private:
  const HostWeight host_;
  PlacedWeight weight_;
  const bool gradient_;
};

class Integers : public Experts {
 public:
  Integers(Rng &rng, const HostInt4Weight &stack, int experts)
      : host_(stack), weight_(rng, host_), experts_(experts) {}
  void dequantize() override {
    const ForcedVariant forced(scalar_variant());
    for (int e = 0; e < experts_; ++e) {
      const HostInt4Weight one = expert_of(host_, experts_, e);
      for (auto [all, part] :
           {std::pair{&elements, int4_elements(one)}, std::pair{&magnitudes, int4_magnitudes(one)}})
        all->insert(all->end(), part.begin(), part.end());
    }
  }
  bool gradient() const override { return false; }
  bool has_codebook() const override { return false; }
  nf4_status multiply(const nf4_grouped_args &args, int threads) const override {
    return nf4_int4_matmul_grouped_cpu(&weight_.tensor(), &args, threads);
  }
  bool surroundings_intact() const override { return weight_.surroundings_intact(); }

 private:
  const HostInt4Weight host_;
  PlacedInt4Weight weight_;
  const int experts_;
};

GuardedBuffer numbers(Rng &rng, const void *from, size_t bytes) {
  GuardedBuffer buffer = random_buffer(rng, bytes, 4);
  if (bytes > 0) std::memcpy(buffer.data(), from, bytes);
  return buffer;
}

// Rows of x or dy for the experts, and y.
struct Product {
  Experts &experts;
  GroupedRows rows;
  Matrix x, bias, y;
  bool has_bias;
  GuardedBuffer ends, x_index, row_scale;

  Product(Rng &rng, Experts &of, nf4_dtype dtype, const GroupedRows &routing)
      : experts(of),
        rows(routing),
        x(rng, dtype, rows.x_rows, of.gradient() ? rows.shape.n : rows.shape.k),
        bias(rng, dtype, rows.shape.experts, rows.shape.n),
        y(rng, dtype, rows.shape.m, of.gradient() ? rows.shape.k : rows.shape.n),
        has_bias(!of.gradient() && rng.one_in(2)),
        ends(numbers(rng, rows.ends.data(), rows.ends.size() * 4)),
        x_index(numbers(rng, rows.x_index.data(), rows.x_index.size() * 4)),
        row_scale(numbers(rng, rows.row_scale.data(), rows.row_scale.size() * 4)) {
    x.fill(rng);
    bias.fill(rng);
  }

  nf4_status multiply(int threads) {
    y.buffer.poison();
    nf4_grouped_args args{};
    args.struct_size = sizeof args;
    args.dtype = x.dtype;
    args.experts = rows.shape.experts;
    args.m = rows.shape.m;
    args.x = x.buffer.data();
    args.x_stride = x.stride;
    args.x_rows = rows.x_rows;
    args.y = y.buffer.data();
    args.y_stride = y.stride;
    args.ends = reinterpret_cast<const int32_t *>(ends.data());
    if (!rows.x_index.empty()) args.x_index = reinterpret_cast<const int32_t *>(x_index.data());
    if (has_bias) args.bias = bias.buffer.data();
    args.bias_stride = bias.stride;
    if (!rows.row_scale.empty()) args.row_scale = reinterpret_cast<const float *>(row_scale.data());
    return experts.multiply(args, threads);
  }
  // Column i of an expert's x, and column j of its y.
  int64_t element(int64_t expert, int64_t i, int64_t j) const {
    const int64_t n = experts.gradient() ? i : j, k = experts.gradient() ? j : i;
    return (expert * rows.shape.n + n) * rows.shape.k + k;
  }
  Expected expect(int64_t row, int64_t j) const {
    const int64_t expert = rows.expert_of(row), x_row = rows.x_row_of(row);
    Expected sum;
    if (has_bias) sum.value = bias(expert, j);
    sum.parts = std::fabs(sum.value);
    for (int64_t i = 0; i < x.cols && x_row >= 0; ++i) {
      const int64_t at = element(expert, i, j);
      sum.value += x(x_row, i) * double{experts.elements[at]};
      sum.parts += std::fabs(x(x_row, i) * double{experts.magnitudes[at]});
      sum.small += std::fabs(x(x_row, i)) + 1;
    }
    if (rows.row_scale.empty()) return sum;
    const double scale = rows.row_scale[row];
    sum.value *= scale;
    sum.parts *= std::fabs(scale);
    sum.small = sum.small * std::fabs(scale) + 1;
    return sum;
  }
  bool surroundings_intact() const {
    for (const GuardedBuffer *buffer :
         {&x.buffer, &bias.buffer, &y.buffer, &ends, &x_index, &row_scale})
      if (!buffer->surroundings_intact()) return false;
    return y.gaps_untouched() && experts.surroundings_intact();
  }
};

void check_product(Product &product) {
  product.experts.dequantize();
  std::vector<Expected> expected(product.y.rows * product.y.cols);
  for (size_t i = 0; i < expected.size(); ++i)
    if (product.rows.expert_of(i / product.y.cols) >= 0)
      expected[i] = product.expect(i / product.y.cols, i % product.y.cols);
  for (const cpu::Variant *variant : supported_variants()) {
    INFO("variant " << variant->name);
    const ForcedVariant forced(*variant);
    REQUIRE(product.multiply(1) == NF4_STATUS_OK);
    for (size_t i = 0; i < expected.size(); ++i) {
      const int64_t row = i / product.y.cols, j = i % product.y.cols;
      if (product.rows.expert_of(row) < 0) continue;
      if (is_right(*variant, product.y.dtype, product.x.cols, product.experts.has_codebook(),
                   expected[i], product.y(row, j)))
        continue;
      INFO("y[" << row << "][" << j << "] of expert " << product.rows.expert_of(row) << " is "
                << product.y(row, j) << ", expected " << expected[i].value);
      FAIL();
    }
    REQUIRE(product.surroundings_intact());
  }
}

// The error of every variant beside that of weights that are rounded to the dtype.
void check_error(Product &product) {
  const nf4_dtype dtype = product.y.dtype;
  const GroupedRows &rows = product.rows;
  product.experts.dequantize();
  std::vector<double> exact;
  RelativeError of_dense;
  for (int64_t row = 0; row < product.y.rows; ++row)
    for (int64_t j = 0; j < product.y.cols; ++j) {
      const int64_t expert = rows.expert_of(row), x_row = rows.x_row_of(row);
      double sum = product.has_bias ? product.bias(expert, j) : 0;
      for (int64_t i = 0; i < product.x.cols && x_row >= 0; ++i)
        sum += product.x(x_row, i) *
               round_to(dtype, product.experts.elements[product.element(expert, i, j)]);
      if (!rows.row_scale.empty()) sum *= double{rows.row_scale[row]};
      exact.push_back(product.expect(row, j).value);
      of_dense.add(round_to(dtype, sum), exact.back());
    }
  for (const cpu::Variant *variant : supported_variants()) {
    INFO("variant " << variant->name << ", m " << product.y.rows << ", dtype " << dtype);
    const ForcedVariant forced(*variant);
    REQUIRE(product.multiply(0) == NF4_STATUS_OK);
    RelativeError ours;
    for (size_t i = 0; i < exact.size(); ++i)
      ours.add(product.y(i / product.y.cols, i % product.y.cols), exact[i]);
    CHECK(ours.value() <= 1.1 * of_dense.value());
  }
}

// Under sanitizers each variant of each product has a few of the numbers of threads.
void check_threads(Product &product, size_t &checked) {
  for (const cpu::Variant *variant : supported_variants()) {
    if (variant->supported == scalar_variant().supported) continue;  // slow
    INFO("variant " << variant->name);
    const ForcedVariant forced(*variant);
    REQUIRE(product.multiply(1) == NF4_STATUS_OK);
    const auto bytes = product.y.bytes();
    for (const int threads : some_of<int>({2, 3, 7, 300, 0}, checked++)) {
      REQUIRE(product.multiply(threads) == NF4_STATUS_OK);
      CHECK(product.y.bytes() == bytes);
    }
  }
}

Codes random_codes(Rng &rng, const CaseClass &kind, const GroupedShape &shape, bool gradient,
                   bool own_codebook = false) {
  HostWeight host = plain_matmul_case(rng, kind, {shape.experts * shape.n, shape.k, 1}).weight;
  if (rng.one_in(3)) host.shape.format = NF4_FORMAT_FP4;
  if (own_codebook) host.bytes[kCodebook] = random_own_codebook(rng, rng.pick(kFirstEntries));
  return Codes(rng, host, gradient);
}

Integers random_integers(Rng &rng, const Int4Class &kind, const GroupedShape &shape,
                         int32_t group_size) {
  const HostInt4Weight stack =
      random_int4_stack(rng, kind, {shape.n, shape.k, group_size}, shape.experts);
  return Integers(rng, stack, shape.experts);
}

int64_t random_m(Rng &rng) { return rng.one_in(5) ? rng.between(60, 200) : rng.between(1, 24); }

}  // namespace

TEST_CASE("every variant's gradient of experts is within the rounding of its sums", "[matmul]") {
  uint64_t stream = 0x35000000;
  for (const nf4_dtype dtype : kDtypes)
    for (const bool nested : {false, true})
      for (int i = 0; i < cases_of(kShapes); ++i) {
        Rng rng(++stream);
        const CaseClass kind{dtype, kBlocksizes[rng.below(5)], nested};
        const GroupedShape shape = random_grouped_shape(rng, kind.blocksize);
        const GroupedRows rows = random_grouped_rows(rng, shape, rng.pick(kRoutings));
        const bool own_codebook = rng.one_in(4);
        INFO("stream " << stream << ", dtype " << dtype << ", " << shape.n << " x " << shape.k
                       << (own_codebook ? ", own codebook, " : ", ") << describe(rows));
        Codes experts = random_codes(rng, kind, shape, true, own_codebook);
        Product product(rng, experts, dtype, rows);
        check_product(product);
      }
}

TEST_CASE("every variant multiplies experts of integers within the rounding of its sums",
          "[matmul]") {
  uint64_t stream = 0x36000000;
  for (const ColumnOrder order : kColumnOrders)
    for (const Int4Class &kind : int4_classes(order))
      for (int i = 0; i < cases_of(kInt4Shapes); ++i) {
        Rng rng(++stream);
        const Int4Shape of_expert = random_int4_shape(rng, kind.layout);
        GroupedShape shape{static_cast<int32_t>(rng.between(1, 6)), of_expert.rows, of_expert.cols,
                           random_m(rng)};
        while (shape.m > 1 && shape.m * shape.n * shape.k > 300000) shape.m /= 2;
        const GroupedRows rows = random_grouped_rows(rng, shape, rng.pick(kRoutings));
        const nf4_dtype dtype = rng.pick(kDtypes);
        INFO("stream " << stream << ", layout " << kind.layout << ", dtype " << dtype << ", "
                       << shape.n << " x " << shape.k << ", " << describe(rows));
        Integers experts = random_integers(rng, kind, shape, of_expert.group_size);
        Product product(rng, experts, dtype, rows);
        check_product(product);
      }
}

TEST_CASE("the number of threads changes no bit of the products of experts, of any kind",
          "[matmul]") {
  uint64_t stream = 0x37000000;
  size_t dtypes = 0, checked = 0;
  for (const nf4_dtype dtype : kDtypes)
    for (const GroupedShape shape : some_of<GroupedShape>(
             {{128, 96, 512, 40}, {3, 1000, 704, 90}, {60, 33, 2080, 9}}, dtypes++)) {
      Rng rng(++stream);
      for (const bool gradient : {false, true}) {
        Codes codes = random_codes(rng, {dtype, 32, true}, shape, gradient);
        Product product(rng, codes, dtype, random_grouped_rows(rng, shape, rng.pick(kRoutings)));
        check_threads(product, checked);
      }
      for (const nf4_int4_layout layout : kInt4Layouts) {
        const GroupedShape of_words{shape.experts, (shape.n + 7) / 8 * 8, shape.k, shape.m};
        Integers integers = random_integers(rng, {layout, NF4_DTYPE_FP16, true, 0}, of_words, 32);
        Product product(rng, integers, dtype, random_grouped_rows(rng, of_words, Routing::kFew));
        check_threads(product, checked);
      }
    }
}

TEST_CASE("products of experts, of any kind, without anything to multiply", "[matmul]") {
  Rng rng(0x38000000);
  for (const GroupedShape shape :
       {GroupedShape{0, 0, 64, 0}, GroupedShape{0, 0, 64, 5}, GroupedShape{0, 16, 64, 5},
        GroupedShape{4, 0, 64, 5}, GroupedShape{4, 16, 64, 0}, GroupedShape{4, 16, 0, 5}}) {
    const GroupedRows rows = random_grouped_rows(rng, shape, Routing::kAny);
    INFO(describe(rows));
    for (const bool gradient : {false, true}) {
      Codes codes = random_codes(rng, {NF4_DTYPE_BF16, 64, true}, shape, gradient);
      Product product(rng, codes, NF4_DTYPE_BF16, rows);
      check_product(product);
    }
    for (const nf4_int4_layout layout : kInt4Layouts) {
      Integers integers = random_integers(rng, {layout, NF4_DTYPE_BF16, true, 0}, shape, -1);
      Product product(rng, integers, NF4_DTYPE_BF16, rows);
      check_product(product);
    }
  }
}

TEST_CASE("the error of experts, and of their gradient, is no more than that of dense weights",
          "[matmul][accuracy]") {
  uint64_t stream = 0x39000000;
  for (const nf4_dtype dtype : kDtypes16)
    for (const bool gradient : {false, true})
      for (const int64_t m : {4, 30, 200}) {
        Rng rng(++stream);
        const GroupedShape shape = gradient ? GroupedShape{4, 1024, 64, m}  //
                                            : GroupedShape{4, 48, 1024, m};
        Codes experts = random_codes(rng, {dtype, 64, true}, shape, gradient);
        Product product(rng, experts, dtype, random_grouped_rows(rng, shape, Routing::kAny));
        check_error(product);
      }
}
