// The arithmetic of lib/core against formulas and searches that share no code with it.
#include <algorithm>
#include <cfenv>
#include <cmath>
#include <set>
#include <vector>

#include "core/decode.hpp"
#include "core/encode.hpp"
#include "core/float16.hpp"
#include "core/formats.hpp"
#include "cpu/reference.hpp"
#include "cuda/quantize/buckets.hpp"
#include "support/catch.hpp"
#include "support/values.hpp"

using namespace nf4;
using nf4::test::codebook_kind;
using nf4::test::CodebookKind;
using nf4::test::kCodebookKindCount;
using nf4::test::random_codebook;
using nf4::test::Rng;

namespace {

const Codebook &kNf4Codebook = kFormats[format_row(NF4_FORMAT_NF4)].codebook;
const Codebook &kFp4Codebook = kFormats[format_row(NF4_FORMAT_FP4)].codebook;

// A 16-bit float with `exponent_bits` exponent bits, from the definition of IEEE-754.
double value_of(uint16_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

constexpr int kHalfExponentBits = 5;
constexpr int kBFloat16ExponentBits = 8;

// Round-to-nearest-even by search: the two neighbours of |x| among all magnitudes, the
// power of two after the largest standing for infinity.
uint16_t nearest(float x, int exponent_bits) {
  const uint16_t infinity =
      static_cast<uint16_t>(((1 << exponent_bits) - 1) << (15 - exponent_bits));
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(x));
  const auto value = [&](int bits) {
    return bits < infinity ? value_of(static_cast<uint16_t>(bits), exponent_bits)
                           : std::ldexp(1.0, 1 << (exponent_bits - 1));
  };
  int low = 0;
  int high = infinity;
  if (magnitude >= value(high)) return sign | infinity;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (value(middle) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - value(low);
  const double above = value(high) - magnitude;
  const bool up = above < below || (above == below && low % 2 == 1);
  return static_cast<uint16_t>(sign | (up ? high : low));
}

bool same(float a, double b) {
  if (std::isnan(b)) return std::isnan(a);
  return a == b && std::signbit(a) == std::signbit(b);
}

bool is_nan16(uint16_t bits, int exponent_bits) {
  return std::isnan(value_of(bits, exponent_bits));
}

// The 16-bit floats that x rounds to, right in both formats?
bool rounds_right(float x) {
  if (std::isnan(x))
    return is_nan16(float_to_half(x), kHalfExponentBits) &&
           is_nan16(float_to_bf16(x), kBFloat16ExponentBits);
  return float_to_half(x) == nearest(x, kHalfExponentBits) &&
         float_to_bf16(x) == nearest(x, kBFloat16ExponentBits);
}

// The codes of the entries that are as near to x as any.
std::set<int> nearest_codes(const float *codebook, float x) {
  std::set<int> codes;
  double best = INFINITY;
  for (int i = 0; i < kCodebookSize; ++i) {
    const double distance = std::fabs(static_cast<double>(codebook[i]) - x);
    if (distance < best) codes.clear();
    best = std::min(best, distance);
    if (distance == best) codes.insert(i);
  }
  return codes;
}

// By the rule of nf4.h: of the nearest, the lowest entry, and of equal entries the lowest
// code.
int expected_code(const float *codebook, float x) {
  const std::set<int> codes = nearest_codes(codebook, x);
  return *std::min_element(codes.begin(), codes.end(), [&](int a, int b) {
    return codebook[a] < codebook[b] || (codebook[a] == codebook[b] && a < b);
  });
}

bool is_threshold(const Quantizer &quantizer, float x) {
  return std::find(std::begin(quantizer.thresholds), std::end(quantizer.thresholds), x) !=
         std::end(quantizer.thresholds);
}

// tree_sum by its definition: whole levels, missing leaves zero.
double level_sum(std::vector<double> values) {
  while (values.size() > 1) {
    if (values.size() % 2 == 1) values.push_back(0);
    for (size_t i = 0; i < values.size() / 2; ++i) values[i] = values[2 * i] + values[2 * i + 1];
    values.resize(values.size() / 2);
  }
  return values.empty() ? 0 : values[0];
}

}  // namespace

TEST_CASE("every 16-bit float becomes the float of its value", "[core]") {
  int wrong = 0;
  for (int i = 0; i < 0x10000; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    wrong += !same(half_to_float(bits), value_of(bits, kHalfExponentBits));
    wrong += !same(bf16_to_float(bits), value_of(bits, kBFloat16ExponentBits));
  }
  CHECK(wrong == 0);
}

TEST_CASE("every 16-bit float comes back from its float", "[core]") {
  int wrong = 0;
  for (int i = 0; i < 0x10000; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    const uint16_t half = float_to_half(half_to_float(bits));
    const uint16_t bf16 = float_to_bf16(bf16_to_float(bits));
    wrong += is_nan16(bits, kHalfExponentBits) ? !is_nan16(half, kHalfExponentBits) : half != bits;
    wrong += is_nan16(bits, kBFloat16ExponentBits) ? !is_nan16(bf16, kBFloat16ExponentBits)
                                                   : bf16 != bits;
  }
  CHECK(wrong == 0);
}

TEST_CASE("floats round to the nearest 16-bit float", "[core]") {
  Rng rng(1);
  int wrong = 0;
  for (int i = 0; i < 300000; ++i) wrong += !rounds_right(rng.any_float());
  // Within the range of half, which few random bit patterns are.
  for (int i = 0; i < 300000; ++i)
    wrong += !rounds_right(std::ldexp(rng.normal(), static_cast<int>(rng.between(-28, 18))));
  CHECK(wrong == 0);
}

TEST_CASE("ties between 16-bit floats go to the even one", "[core]") {
  int wrong = 0;
  for (int i = 0; i < 0x8000; ++i) {
    for (const int exponent_bits : {kHalfExponentBits, kBFloat16ExponentBits}) {
      const double low = value_of(static_cast<uint16_t>(i), exponent_bits);
      const double high = value_of(static_cast<uint16_t>(i + 1), exponent_bits);
      if (!std::isfinite(low + high)) continue;
      const auto tie = static_cast<float>((low + high) / 2);
      for (const float x : {tie, std::nextafter(tie, INFINITY), std::nextafter(tie, 0.0f)})
        wrong += !rounds_right(x) + !rounds_right(-x);
    }
  }
  // The halves' way to infinity.
  for (const float x : {65504.0f, 65519.996f, 65520.0f, 65536.0f, 1e30f, INFINITY})
    wrong += !rounds_right(x) + !rounds_right(-x);
  CHECK(wrong == 0);
}

TEST_CASE("the codebooks are the published ones", "[core]") {
  const double fp4[] = {0, 1 / 192.0, 2 / 3.0, 1, 1 / 3.0, 1 / 2.0, 1 / 6.0, 1 / 4.0};
  for (int i = 0; i < 8; ++i) {
    CHECK(same(kFp4Codebook[i], static_cast<float>(fp4[i])));
    CHECK(same(kFp4Codebook[i + 8], -static_cast<float>(fp4[i])));
  }
  CHECK(std::is_sorted(kNf4Codebook.begin(), kNf4Codebook.end()));
  CHECK(kNf4Codebook[0] == -1);
  CHECK(kNf4Codebook[7] == 0);
  CHECK(kNf4Codebook[15] == 1);
  CHECK(std::is_sorted(kScaleCode.begin(), kScaleCode.end()));
  CHECK(std::set<float>(kScaleCode.begin(), kScaleCode.end()).size() == 256);
  CHECK(kScaleCode[127] == 0);
  CHECK(kScaleCode[255] == 1);
}

TEST_CASE("a format is found by its id", "[core]") {
  for (int row = 0; row < static_cast<int>(std::size(kFormats)); ++row) {
    CHECK(format_row(kFormats[row].id) == row);
    CHECK(nf4_codebook(kFormats[row].id) == kFormats[row].codebook.data());
  }
  CHECK(format_row(0) == -1);
  CHECK(format_row(5) == -1);
}

TEST_CASE("the thresholds of NF4 are the float32 midpoints", "[core]") {
  const Quantizer quantizer = make_quantizer(kNf4Codebook.data());
  for (int i = 0; i < kCodebookSize - 1; ++i) {
    const double exact = (double{kNf4Codebook[i]} + kNf4Codebook[i + 1]) / 2;
    CHECK(quantizer.thresholds[i] == static_cast<float>(exact));
    CHECK(quantizer.codes[i] == i);
  }
  // Where the literals of bitsandbytes' CUDA source are one ulp away.
  CHECK(float_bits(quantizer.thresholds[0]) == 0xbf591cd8);
  CHECK(float_bits(quantizer.thresholds[8]) == 0x3df64862);
  CHECK(float_bits(quantizer.thresholds[12]) == 0x3f006d04);
  CHECK(float_bits(quantizer.thresholds[14]) == 0x3f5c89da);
}

TEST_CASE("encode finds the nearest entry of any codebook", "[core]") {
  Rng rng(2);
  int wrong = 0;
  for (int i = 0; i < 400; ++i) {
    const test::CodebookKind kinds[] = {test::CodebookKind::kSorted, test::CodebookKind::kShuffled,
                                        test::CodebookKind::kDuplicates};
    std::vector<float> codebook = test::random_codebook(rng, rng.pick(kinds));
    if (i < test::kFormatCount)
      codebook.assign(kFormats[i].codebook.begin(), kFormats[i].codebook.end());
    const Quantizer quantizer = make_quantizer(codebook.data());
    for (int j = 0; j < 300; ++j) {
      const float x = rng.one_in(10) ? rng.pick({-1.0f, 0.0f, -0.0f, 1.0f}) : 2 * rng.uniform() - 1;
      // The float32 midpoint may itself be off by half an ulp: there the rule decides.
      if (is_threshold(quantizer, x)) continue;
      wrong += static_cast<int>(encode(quantizer, x, 1.0f)) != expected_code(codebook.data(), x);
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("encode gives a tie to the lower entry", "[core]") {
  for (int row = 0; row < test::kFormatCount; ++row) {
    const Codebook &codebook = kFormats[row].codebook;
    const Quantizer quantizer = make_quantizer(codebook.data());
    for (int i = 0; i < kCodebookSize - 1; ++i) {
      const float tie = quantizer.thresholds[i];
      if (i > 0 && tie == quantizer.thresholds[i - 1]) continue;
      const float low = codebook[encode(quantizer, tie, 1.0f)];
      const float high = codebook[encode(quantizer, std::nextafter(tie, 2.0f), 1.0f)];
      CHECK(low < high);
      CHECK(codebook[encode(quantizer, std::nextafter(tie, -2.0f), 1.0f)] == low);
    }
  }
}

TEST_CASE("encode places what is not finite", "[core]") {
  const Quantizer nf4 = make_quantizer(kNf4Codebook.data());
  CHECK(encode(nf4, NAN, 1.0f) == 7);
  CHECK(encode(nf4, INFINITY, 1.0f) == 15);
  CHECK(encode(nf4, -INFINITY, 1.0f) == 0);
  const Quantizer fp4 = make_quantizer(kFp4Codebook.data());
  CHECK(encode(fp4, NAN, 1.0f) == 0);
  CHECK(encode(fp4, -0.0f, 1.0f) == 0);
  CHECK(encode(fp4, INFINITY, 1.0f) == 3);
  CHECK(encode(fp4, -INFINITY, 1.0f) == 11);
  CHECK(finite_magnitude(NAN) == 0);
  CHECK(finite_magnitude(-INFINITY) == 0);
  CHECK(finite_magnitude(-2.5f) == 2.5f);
  CHECK(inverse_scale(0) == 0x1p126f);
  CHECK(inverse_scale(1e-45f) == 0x1p126f);
}

TEST_CASE("encode_scale finds the nearest entry", "[core]") {
  Rng rng(3);
  int wrong = 0;
  for (int i = 0; i < 20000; ++i) {
    const float x = 2 * rng.uniform() - 1;
    const uint8_t code = encode_scale(kScaleCode.data(), x);
    double best = INFINITY;
    for (const float entry : kScaleCode) best = std::min(best, std::fabs(double{entry} - x));
    // The float32 midpoint may itself be off by half an ulp.
    wrong += std::fabs(double{kScaleCode[code]} - x) > best + 0x1p-24;
  }
  CHECK(wrong == 0);
  for (int i = 0; i < 256; ++i) CHECK(encode_scale(kScaleCode.data(), kScaleCode[i]) == i);
}

TEST_CASE("a nested scale is rounded twice", "[core]") {
  // 1 + 2^-12 squared is 1 + 2^-11 + 2^-24, whose last bit a fused add would keep.
  const float x = 1 + 0x1p-12f;
  CHECK(nested_scale(x, x, -1.0f) == 0x1p-11f);
}

TEST_CASE("even elements are in the high nibble", "[core]") {
  const uint8_t packed[] = {0x2e, 0x71};
  CHECK(unpack_code(packed, 0) == 2);
  CHECK(unpack_code(packed, 1) == 14);
  CHECK(unpack_code(packed, 2) == 7);
  CHECK(unpack_code(packed, 3) == 1);
  CHECK(pack_codes(2, 14) == 0x2e);
}

TEST_CASE("tree_sum adds whole levels", "[core]") {
  Rng rng(5);
  int wrong = 0;
  for (int i = 0; i < 300; ++i) {
    std::vector<float> values(i < 40 ? i : rng.between(0, 5000));
    for (float &value : values) value = std::ldexp(rng.uniform(), static_cast<int>(rng.below(60)));
    const double sum = cpu::tree_sum(values.data(), static_cast<int64_t>(values.size()));
    wrong += sum != level_sum({values.begin(), values.end()});
  }
  CHECK(wrong == 0);
}

TEST_CASE("the GPU's table of buckets finds the code that counting thresholds finds", "[core]") {
  Rng rng(0x9000000);
  int compared = 0;
  for (int i = 0; i < 3000; ++i) {
    const CodebookKind kind = codebook_kind(i % kCodebookKindCount);
    const std::vector<float> own = random_codebook(rng, kind);
    Codebook codebook;
    const float *entries = own.empty() ? nf4_codebook(format_of(kind)) : own.data();
    std::copy_n(entries, kCodebookSize, codebook.begin());
    const cuda::Tables tables = cuda::make_tables(codebook);
    if (tables.crowded) continue;
    for (int probe = 0; probe < 400; ++probe) {
      float x = rng.uniform() * 2 - 1;
      if (probe % 4 == 0) x = tables.quantizer.thresholds[probe / 4 % 15];
      if (probe % 4 == 1) x = static_cast<float>(rng.between(-16, 16)) / 16;
      if (probe % 8 >= 4) x = std::nextafter(x, rng.one_in(2) ? 2.0f : -2.0f);
      // The values that a value times a rounded reciprocal can have.
      if (!(std::fabs(x) <= 1 + 0x1p-22f)) continue;
      const cuda::Bucket &bucket = tables.buckets[cuda::bucket_number(x) & 31];
      const uint32_t code = (x > bucket.threshold ? bucket.codes >> 24 : bucket.codes >> 28) & 15u;
      ++compared;
      // An assertion for each probe would take most of the time.
      const uint32_t expected = encode(tables.quantizer, x, 1.0f);
      if (code == expected) continue;
      INFO("x " << x << ", codebook " << i);
      REQUIRE(code == expected);
    }
  }
  CHECK(compared > 500000);
}
