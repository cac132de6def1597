// Every CPU variant that this machine runs against the scalar reference of integer weights, bit for
// bit, with guard pages around every buffer.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/backend.hpp"
#include "cpu/cache.hpp"
#include "nf4/nf4.h"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/force.hpp"
#include "support/int4_cases.hpp"
#include "support/placed.hpp"
#include "support/reserved.hpp"
#include "support/small_cache.hpp"
#include "support/variants.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

constexpr int kShapes = 40;  // per class
constexpr int kThreadCounts[] = {1, 1, 2, 7, 300};

GuardedBuffer dequantize(const cpu::Variant &variant, nf4_dtype dtype,
                         const PlacedInt4Weight &weight, Rng &rng, int threads) {
  const ForcedVariant forced(variant);
  const nf4_int4_tensor &tensor = weight.tensor();
  GuardedBuffer out =
      random_buffer(rng, tensor.rows * tensor.cols * dtype_bytes(dtype), dtype_bytes(dtype));
  REQUIRE(nf4_int4_dequant_cpu(&tensor, out.data(), dtype, threads) == NF4_STATUS_OK);
  return out;
}

void check_dequant(const HostInt4Weight &host, nf4_dtype dtype, Rng &rng, int threads) {
  const PlacedInt4Weight weight(rng, host);
  const GuardedBuffer expected = dequantize(scalar_variant(), dtype, weight, rng, threads);
  for (const cpu::Variant *variant : supported_variants()) {
    INFO("variant " << variant->name << ", threads " << threads << ", dtype " << dtype);
    const GuardedBuffer got = dequantize(*variant, dtype, weight, rng, threads);
    REQUIRE(first_difference(dtype, got.data(), expected.data(), host.elements()) == kNoDifference);
    REQUIRE(got.surroundings_intact());
  }
  for (int part = 0; part < kInt4PartCount; ++part)
    REQUIRE((!host.has(part) || weight.unchanged(part)));
}

void quantize(const cpu::Variant &variant, nf4_dtype dtype, bool symmetric,
              const std::vector<uint8_t> &input, PlacedInt4Weight &weight, Rng &rng, int threads) {
  const ForcedVariant forced(variant);
  const GuardedBuffer in = random_buffer(rng, input.size(), dtype_bytes(dtype));
  std::copy(input.begin(), input.end(), in.data());
  REQUIRE(nf4_int4_quantize_cpu(in.data(), dtype, &weight.tensor(), symmetric, threads) ==
          NF4_STATUS_OK);
  REQUIRE(std::equal(input.begin(), input.end(), in.data()));
  REQUIRE(weight.surroundings_intact());
}

void check_quantize(const HostInt4Weight &host, nf4_dtype dtype, bool symmetric, Rng &rng) {
  const std::vector<uint8_t> in = random_int4_input(rng, dtype, host);
  PlacedInt4Weight expected(rng, host);
  quantize(scalar_variant(), dtype, symmetric, in, expected, rng, 1);
  for (const cpu::Variant *variant : supported_variants()) {
    const int threads = rng.pick(kThreadCounts);
    INFO("variant " << variant->name << ", threads " << threads << ", dtype " << dtype);
    PlacedInt4Weight got(rng, host);
    quantize(*variant, dtype, symmetric, in, got, rng, threads);
    for (const Int4Part part : {kInt4Packed, kInt4Scales, kInt4Zeros}) {
      if (!host.has(part)) continue;
      INFO("part " << part);
      REQUIRE(first_difference(got.data(part), expected.data(part),
                               static_cast<int64_t>(host.bytes[part].size())) == kNoDifference);
    }
  }
}

}  // namespace

TEST_CASE("every variant dequantizes integer weights to the bits of the reference", "[cpu]") {
  uint64_t stream = 0x13000000;
  for (const ColumnOrder order : kColumnOrders)
    for (const Int4Class &kind : int4_classes(order))
      for (int i = 0; i < cases_of((order == ColumnOrder::kPlain ? 4 : 1) * kShapes); ++i) {
        Rng rng(++stream);
        const HostInt4Weight weight =
            random_int4_weight(rng, kind, random_int4_shape(rng, kind.layout));
        INFO(describe(weight, stream));
        check_dequant(weight, rng.pick(kDtypes), rng, rng.pick(kThreadCounts));
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
      for (int i = 0; i < cases_of(kShapes); ++i) {
        if (!symmetric && !kind.zeros) continue;
        Rng rng(++stream);
        const HostInt4Weight weight = empty_int4_weight(kind, random_int4_shape(rng, kind.layout));
        INFO(describe(weight, stream) << (symmetric ? ", symmetric" : ""));
        check_quantize(weight, rng.pick(kDtypes), symmetric, rng);
      }
}

TEST_CASE("every variant quantizes integer weights of whole vectors", "[cpu]") {
  uint64_t stream = 0x1e000000;
  for (const Int4Class &kind : int4_classes())
    for (const Int4Shape &shape : {Int4Shape{256, 640, 128}, {392, 1024, 32}, {128, 384, -1}}) {
      Rng rng(++stream);
      const HostInt4Weight weight = empty_int4_weight(kind, shape);
      INFO(describe(weight, stream));
      check_quantize(weight, rng.pick(kDtypes), !kind.zeros, rng);
    }
}
