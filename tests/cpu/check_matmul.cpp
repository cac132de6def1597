// Matmul on the CPU, of codebook weights and what holds for any kind; check_int4_matmul.cpp has the
// shapes of integer weights.
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "core/float16.hpp"
#include "support/cpu_matmul.hpp"
#include "support/reserved.hpp"
#include "support/some_of.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

constexpr int kShapes = 150;  // per dtype, flat or nested

// Ordinary weights: scales of about 1.
MatmulCase plain_case(Rng &rng, nf4_dtype dtype, const MatmulShape &shape, XKind x,
                      CodebookKind codebook = CodebookKind::kNf4) {
  MatmulCase test = random_matmul_case(rng, {dtype, 64, false}, codebook, shape, x);
  auto *scales = reinterpret_cast<float *>(test.weight.bytes[kAbsmax].data());
  for (size_t i = 0; i < test.weight.bytes[kAbsmax].size() / sizeof(float); ++i)
    scales[i] = 0.5f + rng.uniform();
  return test;
}

// Ordinary integer weights: asymmetric, of a layout at random.
Int4MatmulCase plain_int4_case(Rng &rng, nf4_dtype dtype, const MatmulShape &shape, XKind x) {
  const Int4Class kind{rng.pick(kInt4Layouts), NF4_DTYPE_FP16, true, 0};
  return random_int4_matmul_case(rng, kind, {shape.rows, shape.cols, 32}, dtype, shape.m, x, true);
}

// Ordinary weights of a kind.
template <class Host>
MatmulCaseOf<Host> plain_case_of(Rng &rng, nf4_dtype dtype, const MatmulShape &shape, XKind x) {
  if constexpr (std::is_same_v<Host, HostWeight>)
    return plain_case(rng, dtype, shape, x);
  else
    return plain_int4_case(rng, dtype, shape, x);
}

// Normal weights, quantized.
MatmulCase normal_case(Rng &rng, const CaseClass &kind, CodebookKind codebook,
                       const MatmulShape &shape, XKind x) {
  MatmulCase test = random_matmul_case(rng, kind, codebook, shape, x);
  std::vector<float> values(shape.rows * shape.cols);
  std::normal_distribution<float> normal;
  std::mt19937_64 engine(rng.bits());
  for (float &value : values) value = normal(engine);
  nf4_tensor weight = test.weight.shape;
  weight.packed = test.weight.bytes[kPacked].data();
  weight.absmax = test.weight.bytes[kAbsmax].data();
  REQUIRE(nf4_quantize_cpu(values.data(), NF4_DTYPE_FP32, &weight, nullptr, 0, 0) == NF4_STATUS_OK);
  return test;
}

}  // namespace

TEST_CASE("every variant multiplies within the rounding of its sums", "[matmul]") {
  constexpr XKind kKinds[] = {XKind::kOrdinary, XKind::kOutliers, XKind::kNotFinite};
  uint64_t stream = 0x4000000;
  for (const nf4_dtype dtype : kDtypes)
    for (const bool nested : {false, true})
      for (int i = 0; i < cases_of(kShapes); ++i) {
        Rng rng(++stream);
        const CaseClass kind{dtype, rng.pick(kBlocksizes), nested};
        const CodebookKind codebook = random_codebook_kind(rng);
        const MatmulCase test =
            random_matmul_case(rng, kind, codebook, random_matmul_shape(rng), rng.pick(kKinds));
        INFO(describe(test, stream));
        check_matmul(test, rng);
      }
}

TEST_CASE("every variant multiplies MXFP4 and NVFP4", "[matmul]") {
  constexpr XKind kKinds[] = {XKind::kOrdinary, XKind::kOutliers, XKind::kNotFinite};
  uint64_t stream = 0x4800000;
  for (const nf4_dtype dtype : kDtypes)
    for (const CaseClass &kind : byte_classes(dtype))
      for (int i = 0; i < cases_of(kShapes); ++i) {
        Rng rng(++stream);
        const MatmulCase test = random_matmul_case(rng, kind, CodebookKind::kNf4,
                                                   random_matmul_shape(rng), rng.pick(kKinds));
        INFO(describe(test, stream));
        check_matmul(test, rng);
      }
}

TEMPLATE_TEST_CASE("many rows of x and of the weight are multiplied in parts", "[matmul]",
                   HostWeight, HostInt4Weight) {
  for (const nf4_dtype dtype : kDtypes) {
    Rng rng(0x39000000 + dtype);
    const MatmulShape shape{304, 1632, 77};
    if constexpr (std::is_same_v<TestType, HostWeight>) {
      check_matmul(
          random_matmul_case(rng, {dtype, 32, true}, CodebookKind::kNf4, shape, XKind::kOrdinary),
          rng);
    } else {
      for (const bool zeros : {false, true}) {
        const Int4Class kind{NF4_INT4_COMPRESSED_TENSORS, NF4_DTYPE_FP16, zeros, 0};
        check_matmul(random_int4_matmul_case(rng, kind, {shape.rows, shape.cols, 32}, dtype,
                                             shape.m, XKind::kOrdinary, true),
                     rng);
      }
    }
  }
}

TEST_CASE("a weight that the dtype holds is multiplied, however large", "[matmul]") {
  constexpr int64_t kCols = 64, kMost = 40;
  std::vector<uint8_t> packed(kCols / 2, 0xff);  // the number 1
  float scale = 2.5e38f;
  nf4_tensor weight{};
  weight.struct_size = sizeof weight;
  weight.format = NF4_FORMAT_NF4;
  weight.blocksize = 64;
  weight.rows = 1;
  weight.cols = kCols;
  weight.packed = packed.data();
  weight.absmax = &scale;
  const std::vector<uint16_t> x(kMost * kCols, float_to_bf16(2e-38f));
  const float expected = kCols * bf16_to_float(x[0]) * scale;
  for (const cpu::Variant *variant : supported_variants())
    for (const int64_t m : {1, 12, 16, 40}) {
      INFO("variant " << variant->name << ", m " << m);
      const ForcedVariant forced(*variant);
      std::vector<uint16_t> y(m);
      const nf4_matmul_args args{sizeof args, NF4_DTYPE_BF16, 0,        m, x.data(),
                                 kCols,       nullptr,        y.data(), 1, nullptr};
      REQUIRE(nf4_matmul_cpu(&weight, &args, 1) == NF4_STATUS_OK);
      for (const uint16_t each : y)
        CHECK(std::fabs(bf16_to_float(each) / expected - 1) <= 2 * kBf16Unit);
    }
}

TEST_CASE("the error is no more than that of a dense weight of the dtype", "[matmul][accuracy]") {
  uint64_t stream = 0x5000000;
  for (const nf4_dtype dtype : kDtypes)
    for (const int64_t m : {1, 3, 4, 5, 16, 33}) {
      for (const XKind x : {XKind::kOrdinary, XKind::kOutliers}) {
        Rng rng(++stream);
        const MatmulCase test = plain_case(rng, dtype, {48, 1024, m}, x);
        INFO(describe(test, stream));
        check_error(test, kLargestError[dtype - 1], rng);
      }
    }
}

TEST_CASE("errors cancel in a row of x that has a mean, too", "[matmul][accuracy]") {
  constexpr int kRowsOfX[] = {1, 4, 20};
  uint64_t stream = 0xb000000;
  size_t kinds = 0;
  for (const nf4_dtype dtype : kDtypes)
    // An x and an m meet both blocksizes: a format has an odd number of steps.
    for (int format = 0; format < kFormatCount; ++format, ++kinds)
      for (const XKind x : {XKind::kShifted, XKind::kPositive})
        for (const int m : kRowsOfX) {
          const CodebookKind codebook = codebook_kind(format);
          Rng rng(++stream);
          const CaseClass kind{dtype, one_of<int>({64, 4096}, kinds++), false};
          const MatmulCase test = normal_case(rng, kind, codebook, {64, 14336, m}, x);
          INFO(describe(test, stream));
          // The errors of a dense bf16 weight, which panels are, have a mean in each block.
          const bool in_panels = dtype == NF4_DTYPE_BF16 && m == 20;
          check_error(test, kLargestError[dtype - 1], rng, in_panels ? "neonbf16" : "");
        }
}

TEMPLATE_TEST_CASE("a row of x that is not finite affects no other", "[matmul]", HostWeight,
                   HostInt4Weight) {
  using Case = MatmulCaseOf<TestType>;
  constexpr int64_t kRows = std::is_same_v<TestType, HostWeight> ? 37 : 40;
  Rng rng(0x6000000);
  for (const nf4_dtype dtype : kDtypes)
    for (const int64_t m : {2, 4, 7, 40}) {
      const Case clean = plain_case_of<TestType>(rng, dtype, {kRows, 352, m}, XKind::kOrdinary);
      Case not_finite = clean;
      const int64_t bad = rng.below(m);
      const int64_t bytes = dtype_bytes(dtype);
      std::memset(&not_finite.x[(bad * clean.x_stride + rng.below(352)) * bytes], 0xff, bytes);
      for (const cpu::Variant *variant : supported_variants()) {
        INFO("variant " << variant->name << ", m " << m << ", dtype " << dtype);
        const ForcedVariant forced(*variant);
        const CpuMatmul<TestType> a(rng, clean), b(rng, not_finite);
        REQUIRE(a.multiply(1) == NF4_STATUS_OK);
        REQUIRE(b.multiply(1) == NF4_STATUS_OK);
        for (int64_t column = 0; column < m; ++column) {
          const int64_t first = column * clean.y_stride * bytes;
          if (column != bad)
            CHECK(std::memcmp(a.y.data() + first, b.y.data() + first, kRows * bytes) == 0);
          else
            for (int64_t row = 0; row < kRows; ++row) CHECK(std::isnan(b[column * kRows + row]));
        }
      }
    }
}

TEST_CASE("empty matmuls: nothing, the bias, or 0", "[matmul]") {
  Rng rng(0x7000000);
  for (const nf4_dtype dtype : kDtypes)
    for (const MatmulShape shape : {MatmulShape{5, 64, 0}, MatmulShape{0, 64, 3},
                                    MatmulShape{5, 0, 3}, MatmulShape{37, 0, 1}}) {
      const CaseClass kind{dtype, 64, rng.one_in(2)};
      MatmulCase test = random_matmul_case(rng, kind, CodebookKind::kNf4, shape, XKind::kOrdinary);
      test.x.reserve(1);  // an address, which memcmp wants for no bytes, too
      INFO(describe(test, 0x7000000));
      check_matmul(test, rng);
      nf4_tensor weight = test.weight.shape;
      nf4_matmul_args args = test.args(nullptr, nullptr, nullptr);
      args.bias = nullptr;
      const bool y_is_empty = shape.m == 0 || shape.rows == 0;
      const nf4_status status = nf4_matmul_cpu(&weight, &args, 1);
      CHECK(status == (y_is_empty ? NF4_STATUS_OK : NF4_STATUS_INVALID_ARGUMENT));
    }
}

TEST_CASE("no pointer of a weight without columns is read", "[matmul]") {
  float *const nowhere = reinterpret_cast<float *>(uintptr_t{9});
  constexpr uint16_t kBias[] = {0x3f80, 0xc000, 0x7f80};
  for (const bool nested : {false, true})
    for (const int64_t m : {1, 4, 20})
      for (const cpu::Variant *variant : supported_variants()) {
        INFO("variant " << variant->name << ", m " << m << (nested ? ", nested" : ", flat"));
        const ForcedVariant forced(*variant);
        const nf4_tensor weight{
            sizeof weight, NF4_FORMAT_NF4, 64,      nested ? 256 : 0, 0,       3,      0,
            nowhere,       nowhere,        nowhere, nowhere,          nowhere, nowhere};
        std::vector<uint16_t> y(m * 3);
        const nf4_matmul_args args{sizeof args, NF4_DTYPE_BF16, 0,        m, nowhere,
                                   0,           kBias,          y.data(), 3, nullptr};
        REQUIRE(nf4_matmul_cpu(&weight, &args, 1) == NF4_STATUS_OK);
        for (int64_t i = 0; i < m * 3; ++i) CHECK(y[i] == kBias[i % 3]);
      }
}

TEST_CASE("the number of threads changes no bit of a matmul", "[matmul]") {
  Rng rng(0x8000000);
  size_t kinds = 0;
  for (const nf4_dtype dtype : kDtypes)
    for (const CodebookKind codebook : {CodebookKind::kNf4, CodebookKind::kSorted})
      for (const MatmulShape shape :
           some_of<MatmulShape>({{1503, 2080, 1}, {1003, 1500, 3}, {301, 2048, 21}}, kinds++))
        check_thread_counts(plain_case(rng, dtype, shape, XKind::kOutliers, codebook), rng);
}

TEST_CASE("a caller's codebook that is a format's own changes no bit of a matmul", "[matmul]") {
  Rng rng(0xc000000);
  for (const nf4_dtype dtype : kDtypes)
    for (int row = 0; row < kFormatCount; ++row)
      for (const int64_t m : {1, 12}) {
        const CodebookKind kind = codebook_kind(row);
        const nf4_format format = format_of(kind);
        MatmulCase test = plain_case(rng, dtype, {21, 512, m}, XKind::kShifted, kind);
        MatmulCase given = test;
        const auto *own = reinterpret_cast<const uint8_t *>(nf4_codebook(format));
        given.weight.bytes[kCodebook].assign(own, own + 16 * sizeof(float));
        // Which format is said means nothing beside a codebook.
        given.weight.shape.format = NF4_FORMAT_NF4;
        for (const cpu::Variant *variant : supported_variants()) {
          INFO("variant " << variant->name << ", dtype " << dtype << ", format " << format);
          const ForcedVariant forced(*variant);
          const CpuMatmul<HostWeight> expected(rng, test), got(rng, given);
          REQUIRE(expected.multiply(1) == NF4_STATUS_OK);
          REQUIRE(got.weight.tensor().codebook != nullptr);
          REQUIRE(got.multiply(1) == NF4_STATUS_OK);
          CHECK(got.bytes() == expected.bytes());
        }
      }
}

#if defined(__SSE2__)
TEMPLATE_TEST_CASE("the caller's floating-point environment changes no bit of a matmul", "[matmul]",
                   HostWeight, HostInt4Weight) {
  constexpr unsigned kFlushAndRoundDown = 0x8040 | 0x2000;
  Rng rng(0x9000000);
  constexpr int64_t kRows = std::is_same_v<TestType, HostWeight> ? 700 : 704;
  for (const nf4_dtype dtype : kDtypes) {
    const auto test = plain_case_of<TestType>(rng, dtype, {kRows, 2048, 2}, XKind::kOutliers);
    for (const cpu::Variant *variant : supported_variants()) {
      INFO("variant " << variant->name);
      const ForcedVariant forced(*variant);
      const CpuMatmul<TestType> expected(rng, test), got(rng, test);
      REQUIRE(expected.multiply(2) == NF4_STATUS_OK);
      const unsigned saved = _mm_getcsr();
      _mm_setcsr(saved | kFlushAndRoundDown);
      const nf4_status status = got.multiply(2);
      const unsigned after = _mm_getcsr();
      _mm_setcsr(saved);
      CHECK(status == NF4_STATUS_OK);
      CHECK((after & kFlushAndRoundDown) == kFlushAndRoundDown);
      CHECK(got.bytes() == expected.bytes());
    }
  }
}
#endif

TEST_CASE("every variant multiplies weights of more than 2^33 elements", "[matmul]") {
  // Only the last rows are worked on, so only their pages exist.
  constexpr int64_t kCols = 4128, kRows = (int64_t{1} << 21) + 5, kLast = 11;
  constexpr int64_t kBlocks = kRows * kCols / 32;
  const Reserved packed(kRows * kCols / 2), absmax(kBlocks * 4);
  const int64_t first = (kRows - kLast) * kCols;
  Rng rng(0xa000000);
  rng.fill(packed.as<uint8_t>() + first / 2, kLast * kCols / 2);
  for (int64_t block = first / 32; block < kBlocks; ++block)
    absmax.as<float>()[block] = 0.5f + rng.uniform();
  for (const int64_t m : {1, 20}) {
    std::vector<float> x(m * kCols), y(m * kRows), expected;
    for (float &value : x) value = rng.normal();
    MatmulProblem problem{};
    problem.weight.format = NF4_FORMAT_NF4;
    problem.weight.rows = kRows;
    problem.weight.cols = kCols;
    problem.weight.elements = kRows * kCols;
    problem.weight.blocks = kBlocks;
    problem.weight.blocksize_log2 = 5;
    problem.weight.nested_blocksize_log2 = -1;
    problem.weight.packed = packed.as<uint8_t>();
    problem.weight.absmax = absmax.as<void>();
    problem.dtype = NF4_DTYPE_FP32;
    problem.m = m;
    problem.x = x.data();
    problem.x_stride = kCols;
    problem.y = y.data();
    problem.y_stride = kRows;
    scalar_variant().matmul(problem, {}, {kRows - kLast, kRows});
    expected = y;
    for (const cpu::Variant *variant : supported_variants()) {
      INFO("variant " << variant->name);
      variant->matmul(problem, {}, {kRows - kLast, kRows});
      for (int64_t column = 0; column < m; ++column)
        for (int64_t row = kRows - kLast; row < kRows; ++row)
          CHECK(y[column * kRows + row] ==
                Approx(expected[column * kRows + row]).epsilon(1e-4).margin(1e-3));
    }
  }
}
