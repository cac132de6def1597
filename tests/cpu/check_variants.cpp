// Every CPU variant that this machine runs against the scalar reference, bit for bit, with
// guard pages around every buffer.
#include <string>
#include <vector>

#include "cpu/backend.hpp"
#include "cpu/cache.hpp"
#include "cpu/dequant/dequant.hpp"
#include "cpu/reference.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/force.hpp"
#include "support/placed.hpp"
#include "support/reserved.hpp"
#include "support/small_cache.hpp"
#include "support/variants.hpp"
#include "validate.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

// Shapes per dtype, blocksize, flat or nested, and format.
constexpr int kShapes = 200;

// Calls check(rng, stream, kind, codebook) kShapes times for every case class and format, and for
// the callers' codebooks.
template <class Check>
void for_every_class(uint64_t stream, const Check &check) {
  for (const CaseClass &kind : case_classes())
    for (int format = 0; format <= kFormatCount; ++format)
      for (int i = 0; i < cases_of(kShapes); ++i) {
        Rng rng(++stream);
        check(rng, stream, kind,
              format < kFormatCount ? codebook_kind(format) : random_own_codebook_kind(rng));
      }
}

// The outputs of quantize, in the order of the parts.
constexpr Part kOutputs[] = {kPacked, kAbsmax, kNestedAbsmax, kNestedOffset};

struct Dequantized {
  GuardedBuffer out;
  nf4_status status;
};

Dequantized dequantize(const cpu::Variant &variant, const DequantCase &test,
                       const PlacedWeight &weight, Rng &rng, int threads) {
  const ForcedVariant forced(variant);
  Dequantized result{random_buffer(rng, test.out_bytes(), dtype_bytes(test.dtype)), 0};
  result.status = nf4_dequant_cpu(&weight.tensor(), result.out.data(), test.dtype, threads);
  return result;
}

void check_dequant(const DequantCase &test, Rng &rng, int threads) {
  const PlacedWeight weight(rng, test.weight);
  const Dequantized expected = dequantize(scalar_variant(), test, weight, rng, threads);
  for (const cpu::Variant *variant : supported_variants()) {
    INFO("variant " << variant->name);
    const Dequantized got = dequantize(*variant, test, weight, rng, threads);
    REQUIRE(got.status == NF4_STATUS_OK);
    REQUIRE(first_difference(test.dtype, got.out.data(), expected.out.data(),
                             test.weight.elements()) == kNoDifference);
    REQUIRE(got.out.surroundings_intact());
  }
  for (int part = 0; part < kPartCount; ++part) REQUIRE(weight.unchanged(Part(part)));
}

// Quantizes into `weight` between guard pages; the input must be left as it was.
void quantize(const cpu::Variant &variant, const QuantizeCase &test, PlacedWeight &weight,
              Rng &rng) {
  const ForcedVariant forced(variant);
  const GuardedBuffer in = random_buffer(rng, test.in.size(), dtype_bytes(test.dtype));
  const GuardedBuffer workspace = random_buffer(rng, test.workspace_bytes, 16);
  std::copy(test.in.begin(), test.in.end(), in.data());
  weight.reset();
  REQUIRE(nf4_quantize_cpu(in.data(), test.dtype, &weight.tensor(), workspace.data(),
                           test.workspace_bytes, 1) == NF4_STATUS_OK);
  REQUIRE(in.surroundings_intact());
  REQUIRE(workspace.surroundings_intact());
  REQUIRE(weight.surroundings_intact());
  REQUIRE(std::equal(test.in.begin(), test.in.end(), in.data()));
}

void check_quantize(const QuantizeCase &test, Rng &rng) {
  PlacedWeight expected(rng, test.weight);
  quantize(scalar_variant(), test, expected, rng);
  for (const cpu::Variant *variant : supported_variants()) {
    INFO("variant " << variant->name);
    PlacedWeight got(rng, test.weight);
    quantize(*variant, test, got, rng);
    for (const Part part : kOutputs) {
      if (!test.weight.has(part)) continue;
      INFO(part_name(part));
      REQUIRE(first_difference(got.data(part), expected.data(part),
                               static_cast<int64_t>(test.weight.bytes[part].size())) ==
              kNoDifference);
    }
  }
}

// Into memory that the system has yet to provide.
void check_untouched_output(const DequantCase &test, Rng &rng, int threads) {
  const PlacedWeight weight(rng, test.weight);
  const Dequantized expected = dequantize(scalar_variant(), test, weight, rng, threads);
  for (const cpu::Variant *variant : supported_variants()) {
    INFO("variant " << variant->name);
    const ForcedVariant forced(*variant);
    const Reserved out(test.out_bytes());
    REQUIRE(nf4_dequant_cpu(&weight.tensor(), out.as<void>(), test.dtype, threads) ==
            NF4_STATUS_OK);
    REQUIRE(first_difference(test.dtype, out.as<uint8_t>(), expected.out.data(),
                             test.weight.elements()) == kNoDifference);
  }
}

#if defined(NF4_AVX2)
int64_t nontemporal_lines = 0;

// AVX2's kernels, counting the lines that bypass the caches.
const cpu::DequantKernels &counting_kernels() {
  static const cpu::DequantKernels counting = [] {
    cpu::DequantKernels kernels = cpu::kAvx2Dequant;
    kernels.store_nontemporal = [](char *to, const char *from, int64_t lines) {
      nontemporal_lines += lines;
      cpu::kAvx2Dequant.store_nontemporal(to, from, lines);
    };
    return kernels;
  }();
  return counting;
}

int64_t count_nontemporal_lines(const PlacedWeight &weight, nf4_dtype dtype, void *out) {
  DequantProblem problem;
  REQUIRE(validate_dequant(&weight.tensor(), out, dtype, problem) == NF4_STATUS_OK);
  nontemporal_lines = 0;
  cpu::dequant_vector(counting_kernels(), problem, {0, problem.weight.blocks});
  return nontemporal_lines;
}
#endif

}  // namespace

#if defined(NF4_AVX2)
TEST_CASE("nontemporal stores are for large outputs in resident memory alone", "[cpu]") {
  if (!__builtin_cpu_supports("avx2")) {
    WARN("this processor has no AVX2");
    return;
  }
  const int64_t limit = cpu::kCachesOfOutput * cpu::last_level_cache_bytes();
  for (const int64_t bytes : {limit / 2, limit + 65536}) {
    Rng rng(14);
    const DequantCase test =
        random_dequant_case(rng, {NF4_DTYPE_BF16, 64, false}, CodebookKind::kNf4, bytes / 2);
    const PlacedWeight weight(rng, test.weight);
    const Reserved untouched(test.out_bytes());
    CHECK(count_nontemporal_lines(weight, test.dtype, untouched.as<void>()) == 0);
    const int64_t lines = count_nontemporal_lines(weight, test.dtype, untouched.as<void>());
    if (bytes < limit)
      CHECK(lines == 0);
    else
      CHECK(lines > bytes / 64 * 9 / 10);
  }
}
#endif

TEST_CASE("every variant dequantizes to the bits of the reference", "[cpu]") {
  for_every_class(0x1000000, [](Rng &rng, uint64_t stream, CaseClass kind, CodebookKind codebook) {
    const DequantCase test =
        random_dequant_case(rng, kind, codebook, random_elements(rng, kind.blocksize));
    INFO(describe(test.weight, test.dtype, stream));
    check_dequant(test, rng, 1);
  });
}

TEST_CASE("every variant quantizes to the bytes of the reference", "[cpu]") {
  for_every_class(0x2000000, [](Rng &rng, uint64_t stream, CaseClass kind, CodebookKind codebook) {
    const QuantizeCase test =
        random_quantize_case(rng, kind, codebook, random_elements(rng, kind.blocksize));
    INFO(describe(test.weight, test.dtype, stream));
    check_quantize(test, rng);
  });
}

TEST_CASE("every variant dequantizes outputs larger than the caches", "[cpu]") {
  const SmallCache cache;
  const int64_t cached_bytes = cpu::kCachesOfOutput * cpu::last_level_cache_bytes();
  uint64_t stream = 0x3000000;
  for (const nf4_dtype dtype : kDtypes) {
    for (const CaseClass kind : {CaseClass{dtype, 64, true}, CaseClass{dtype, 4096, false}}) {
      Rng rng(++stream);
      const DequantCase test = random_dequant_case(
          rng, kind, CodebookKind::kNf4, cached_bytes / dtype_bytes(dtype) + rng.between(1, 5000));
      INFO(describe(test.weight, test.dtype, stream));
      check_dequant(test, rng, 3);
      check_untouched_output(test, rng, 3);
    }
  }
}

TEST_CASE("every variant finds elements beyond 2^33", "[cpu]") {
  // Only the last blocks are worked on, so only their pages exist.
  constexpr int64_t kElements = (int64_t{1} << 33) + 1000;
  const Reserved packed(kElements / 2);
  const Reserved dense(kElements * 2);
  const Reserved absmax(kElements / 64 * 4 + 64);
  Weight weight{};
  weight.format = NF4_FORMAT_NF4;
  weight.elements = kElements;
  weight.blocksize_log2 = 6;
  weight.blocks = (kElements + 63) / 64;
  weight.nested_blocksize_log2 = -1;
  weight.packed = packed.as<uint8_t>();
  weight.absmax = absmax.as<void>();
  const DequantProblem there{weight, dense.as<void>(), NF4_DTYPE_BF16, {}};
  const QuantizeProblem back{weight, dense.as<void>(), NF4_DTYPE_BF16, nullptr, {}};

  const cpu::BlockRange last{weight.blocks - 11, weight.blocks};
  const int64_t first = last.begin * 64;
  const int64_t count = kElements - first;
  const auto values = [&] { return dense.as<uint16_t>() + first; };
  const auto codes = [&] { return packed.as<uint8_t>() + first / 2; };
  Rng rng(7);
  rng.fill(codes(), count / 2);
  std::fill_n(absmax.as<float>() + last.begin, 11, 1.0f);
  cpu::dequant_reference(there, last);
  const std::vector<uint16_t> expected_values(values(), values() + count);
  cpu::quantize_reference(back, absmax.as<float>(), last);
  const std::vector<uint8_t> expected_codes(codes(), codes() + count / 2);
  for (const cpu::Variant *variant : supported_variants()) {
    INFO("variant " << variant->name);
    std::fill_n(codes(), count / 2, uint8_t{0});
    variant->quantize(back, absmax.as<float>(), last);
    CHECK(std::equal(expected_codes.begin(), expected_codes.end(), codes()));
    std::fill_n(values(), count, uint16_t{0});
    variant->dequant(there, last);
    CHECK(std::equal(expected_values.begin(), expected_values.end(), values()));
  }
}

TEST_CASE("the choice of a variant", "[cpu]") {
  const auto variants = supported_variants();
  REQUIRE(!variants.empty());
  CHECK(std::string(scalar_variant().name) == "scalar");
  CHECK(variants.back() == &scalar_variant());
  CHECK(std::string(nf4_cpu_variant()) == variants.front()->name);
  for (const cpu::Variant *variant : variants) {
    const ForcedVariant forced(*variant);
    CHECK(std::string(nf4_cpu_variant()) == variant->name);
  }
  std::string listed;
  for (const cpu::Variant &variant : cpu::variants())
    listed += std::string(listed.empty() ? "" : " ") + variant.name;
  CHECK(std::string(nf4_build_info()).find("cpu_variants: " + listed) != std::string::npos);
}
