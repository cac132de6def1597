// Every CPU variant that this machine runs against the scalar reference, bit for bit, with
// guard pages around every buffer.
#include <algorithm>
#include <string>
#include <vector>

#include "cpu/backend.hpp"
#include "cpu/cache.hpp"
#include "cpu/dequant/dequant.hpp"
#include "cpu/reference.hpp"
#include "support/compare.hpp"
#include "support/cpu_matmul.hpp"
#include "support/int4_cases.hpp"
#include "support/reserved.hpp"
#include "support/small_cache.hpp"
#include "validate.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

// Shapes per dtype, blocksize, flat or nested, and format.
constexpr int kShapes = 200;
constexpr int kInt4Shapes = 40;  // per class
constexpr int kThreads[] = {1, 1, 2, 7, 300};

std::vector<const cpu::Variant *> scalar_variant_first() {
  std::vector<const cpu::Variant *> variants = supported_variants();
  std::reverse(variants.begin(), variants.end());
  return variants;
}

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

template <class Host>
void dequantize(const cpu::Variant &variant, nf4_dtype dtype, const PlacedWeightOf<Host> &weight,
                GuardedBuffer &out, int threads) {
  const ForcedVariant forced(variant);
  out.poison();
  REQUIRE(dequant_cpu(weight.tensor(), out.data(), dtype, threads) == NF4_STATUS_OK);
  REQUIRE(out.surroundings_intact());
}

template <class Host>
GuardedBuffer output_of(Rng &rng, const Host &host, nf4_dtype dtype) {
  const int item = dtype_bytes(dtype);
  return random_buffer(rng, host.elements() * item, item);
}

template <class Host>
void check_dequant(const Host &host, nf4_dtype dtype, Rng &rng, int threads) {
  const PlacedWeightOf<Host> weight(rng, host);
  // Guard pages take much of the time: all variants have one place.
  GuardedBuffer expected = output_of(rng, host, dtype), got = output_of(rng, host, dtype);
  for (const cpu::Variant *variant : scalar_variant_first()) {
    INFO("variant " << variant->name << ", threads " << threads << ", dtype " << dtype);
    const bool is_reference = variant == &scalar_variant();
    dequantize(*variant, dtype, weight, is_reference ? expected : got, threads);
    if (is_reference) continue;
    REQUIRE(first_difference(dtype, got.data(), expected.data(), host.elements()) == kNoDifference);
  }
  for (int part = 0; part < Host::kParts; ++part) REQUIRE(weight.unchanged(part));
}

// quantize(tensor, in, threads) is to leave the bytes of the reference in a weight between guard
// pages, and its input as it was.
template <class Host, class Quantize>
void check_quantize(const Host &host, nf4_dtype dtype, const std::vector<uint8_t> &input, Rng &rng,
                    const Quantize &quantize,
                    const std::vector<const cpu::Variant *> &variants = supported_variants()) {
  // Guard pages take most of the time: all variants have one place.
  const GuardedBuffer in = random_buffer(rng, input.size(), dtype_bytes(dtype));
  std::copy(input.begin(), input.end(), in.data());
  const auto run = [&](const cpu::Variant &variant, PlacedWeightOf<Host> &weight, int threads) {
    const ForcedVariant forced(variant);
    weight.reset();
    REQUIRE(quantize(weight.tensor(), in.data(), threads) == NF4_STATUS_OK);
    REQUIRE(in.surroundings_intact());
    REQUIRE(weight.surroundings_intact());
    REQUIRE(std::equal(input.begin(), input.end(), in.data()));
  };
  PlacedWeightOf<Host> expected(rng, host), got(rng, host);
  run(scalar_variant(), expected, 1);
  for (const cpu::Variant *variant : variants) {
    const int threads = rng.pick(kThreads);
    INFO("variant " << variant->name << ", threads " << threads << ", dtype " << dtype);
    run(*variant, got, threads);
    // Memory that quantize does not write is the same, too.
    for (int part = 0; part < Host::kParts; ++part) {
      if (!host.has(part)) continue;
      INFO("part " << part);
      REQUIRE(first_difference(got.data(part), expected.data(part),
                               static_cast<int64_t>(host.bytes[part].size())) == kNoDifference);
    }
  }
}

void check_quantize(const QuantizeCase &test, Rng &rng) {
  std::vector<const cpu::Variant *> variants = supported_variants();
  // The variants share what quantizes to MXFP4 and NVFP4, so a variant without functions does it.
  static const cpu::Variant none = [] {
    cpu::Variant variant{};
    variant.name = "none";
    return variant;
  }();
  if (format_has_scale_bytes(test.weight.shape.format)) variants = {&none};
  check_quantize(
      test.weight, test.dtype, test.in, rng,
      [&](const nf4_tensor &weight, void *in, int threads) {
        const GuardedBuffer workspace = random_buffer(rng, test.workspace_bytes, 16);
        const nf4_status status = nf4_quantize_cpu(in, test.dtype, &weight, workspace.data(),
                                                   test.workspace_bytes, threads);
        REQUIRE(workspace.surroundings_intact());
        return status;
      },
      variants);
}

void check_int4_quantize(const HostInt4Weight &host, bool symmetric, Rng &rng) {
  const nf4_dtype dtype = rng.pick(kDtypes);
  check_quantize(host, dtype, random_int4_input(rng, dtype, host), rng,
                 [&](const nf4_int4_tensor &weight, void *in, int threads) {
                   return nf4_int4_quantize_cpu(in, dtype, &weight, symmetric, threads);
                 });
}

// Into memory that the system has yet to provide.
void check_untouched_output(const DequantCase &test, Rng &rng, int threads) {
  const PlacedWeight weight(rng, test.weight);
  GuardedBuffer expected = output_of(rng, test.weight, test.dtype);
  dequantize(scalar_variant(), test.dtype, weight, expected, threads);
  for (const cpu::Variant *variant : supported_variants()) {
    INFO("variant " << variant->name);
    const ForcedVariant forced(*variant);
    const Reserved out(test.out_bytes());
    REQUIRE(nf4_dequant_cpu(&weight.tensor(), out.as<void>(), test.dtype, threads) ==
            NF4_STATUS_OK);
    REQUIRE(first_difference(test.dtype, out.as<uint8_t>(), expected.data(),
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
    check_dequant(test.weight, test.dtype, rng, 1);
  });
}

TEST_CASE("every variant dequantizes MXFP4 and NVFP4 to the bits of the reference", "[cpu]") {
  uint64_t stream = 0x31000000;
  for (const nf4_dtype dtype : kDtypes)
    for (const CaseClass &kind : byte_classes(dtype))
      for (int i = 0; i < cases_of(kShapes); ++i) {
        Rng rng(++stream);
        const int64_t cols = rng.between(1, 40) * kind.blocksize;
        const HostWeight weight = random_byte_weight(rng, kind, rng.between(1, 60), cols, false);
        INFO(describe(weight, dtype, stream));
        check_dequant(weight, dtype, rng, rng.pick(kThreads));
      }
}

TEST_CASE("any number of threads quantizes to the same MXFP4 and NVFP4", "[cpu]") {
  uint64_t stream = 0x32000000;
  for (const nf4_dtype dtype : kDtypes)
    for (const CaseClass &kind : byte_classes(dtype))
      for (int i = 0; i < cases_of(kShapes); ++i) {
        Rng rng(++stream);
        const int64_t cols = rng.between(1, 40) * kind.blocksize;
        const HostWeight weight = random_byte_weight(rng, kind, rng.between(1, 60), cols, true);
        std::vector<uint8_t> in(weight.elements() * dtype_bytes(dtype));
        rng.fill(in.data(), in.size());
        INFO(describe(weight, dtype, stream));
        check_quantize({dtype, in, weight, 0}, rng);
      }
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
      check_dequant(test.weight, test.dtype, rng, 3);
      check_untouched_output(test, rng, 3);
    }
  }
}

TEST_CASE("every variant dequantizes integer weights to the bits of the reference", "[cpu]") {
  uint64_t stream = 0x13000000;
  for (const ColumnOrder order : kColumnOrders)
    for (const Int4Class &kind : int4_classes(order))
      for (int i = 0; i < cases_of((order == ColumnOrder::kPlain ? 4 : 1) * kInt4Shapes); ++i) {
        Rng rng(++stream);
        const HostInt4Weight weight =
            random_int4_weight(rng, kind, random_int4_shape(rng, kind.layout));
        INFO(describe(weight, stream));
        check_dequant(weight, rng.pick(kDtypes), rng, rng.pick(kThreads));
      }
}

TEST_CASE("every variant dequantizes integer weights larger than the caches", "[cpu]") {
  const SmallCache cache;
  const int64_t bytes = cpu::kCachesOfOutput * cpu::last_level_cache_bytes();
  uint64_t stream = 0x14000000;
  for (const Int4Class &kind : {Int4Class{NF4_INT4_GPTQ, NF4_DTYPE_FP16, true, 1},
                                {NF4_INT4_AWQ, NF4_DTYPE_FP16, true, 0},
                                {NF4_INT4_COMPRESSED_TENSORS, NF4_DTYPE_BF16, false, 0}}) {
    Rng rng(++stream);
    const nf4_dtype dtype = rng.pick(kDtypes);
    const int64_t cols = 128 * rng.between(17, 30);
    const int64_t rows = (bytes / dtype_bytes(dtype) / cols + rng.between(1, 60)) / 8 * 8 + 8;
    const HostInt4Weight weight = random_int4_weight(rng, kind, {rows, cols, 128});
    INFO(describe(weight, stream));
    check_dequant(weight, dtype, rng, 3);
  }
}

TEST_CASE("every variant quantizes integer weights to the bytes of the reference", "[cpu]") {
  uint64_t stream = 0x15000000;
  for (const Int4Class &kind : int4_classes())
    for (const bool symmetric : {false, true})
      for (int i = 0; i < cases_of(kInt4Shapes); ++i) {
        if (!symmetric && !kind.zeros) continue;
        Rng rng(++stream);
        const HostInt4Weight weight = empty_int4_weight(kind, random_int4_shape(rng, kind.layout));
        INFO(describe(weight, stream) << (symmetric ? ", symmetric" : ""));
        check_int4_quantize(weight, symmetric, rng);
      }
}

TEST_CASE("every variant quantizes integer weights of whole vectors", "[cpu]") {
  uint64_t stream = 0x1e000000;
  for (const Int4Class &kind : int4_classes())
    for (const Int4Shape &shape : {Int4Shape{256, 640, 128}, {392, 1024, 32}, {128, 384, -1}}) {
      Rng rng(++stream);
      const HostInt4Weight weight = empty_int4_weight(kind, shape);
      INFO(describe(weight, stream));
      check_int4_quantize(weight, !kind.zeros, rng);
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
