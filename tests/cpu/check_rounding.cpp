// Codebooks in 16 bits: the errors that their rounding causes in quantized normal weights.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/encode.hpp"
#include "core/float16.hpp"
#include "core/formats.hpp"
#include "core/round_codebook.hpp"
#include "support/catch.hpp"
#include "support/values.hpp"

using namespace nf4;
using nf4::test::CodebookKind;
using nf4::test::random_codebook;
using nf4::test::Rng;

namespace {

const Codebook &kNf4Codebook = kFormats[format_row(NF4_FORMAT_NF4)].codebook;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

Codebook to_codebook(const std::vector<float> &entries) {
  Codebook codebook;
  std::copy(entries.begin(), entries.end(), codebook.begin());
  return codebook;
}

// A million normal weights.
const std::vector<float> &normal_weights() {
  static const std::vector<float> weights = [] {
    std::mt19937_64 engine(Rng(0xc500000).bits());
    std::normal_distribution<float> normal;
    std::vector<float> made(1 << 20);
    for (float &each : made) each = normal(engine);
    return made;
  }();
  return weights;
}

// How many of them in such blocks are stored as each code.
std::vector<double> count_codes(const Codebook &codebook, int blocksize) {
  const Quantizer quantizer = make_quantizer(codebook.data());
  std::vector<double> counts(kCodebookSize);
  const float *const end = normal_weights().data() + normal_weights().size();
  for (const float *block = normal_weights().data(); block < end; block += blocksize) {
    float absmax = 0;
    for (int i = 0; i < blocksize; ++i) absmax = std::max(absmax, std::fabs(block[i]));
    const float inverse = inverse_scale(absmax);
    for (int i = 0; i < blocksize; ++i) ++counts[encode(quantizer, block[i], inverse)];
  }
  return counts;
}

// Relative to the weights' root mean square.
struct Error {
  double rms;
  double mean;
};

Error error_of(const Codebook &codebook, const std::vector<double> &values,
               const std::vector<double> &counts) {
  double total = 0, square = 0, error = 0, square_error = 0;
  for (int i = 0; i < kCodebookSize; ++i) {
    const double wrong = values[i] - codebook[i];
    total += counts[i];
    square += counts[i] * codebook[i] * codebook[i];
    error += counts[i] * wrong;
    square_error += counts[i] * wrong * wrong;
  }
  return {std::sqrt(square_error / square), error / std::sqrt(total * square)};
}

template <class T>
std::vector<double> values_of(const RoundedCodebook &rounded) {
  std::vector<double> values;
  for (const uint16_t bits : rounded.entries)
    values.push_back(double{to_float(T{bits})} * rounded.unit);
  return values;
}

template <class T>
std::vector<double> rounded_as_it_is(const Codebook &codebook) {
  std::vector<double> values;
  for (const float entry : codebook) values.push_back(to_float(from_float<T>(entry)));
  return values;
}

// Within half a unit of the dtype, a little more for the unit's own rounding; what is not finite
// as it was.
template <class T>
void check_entries(const Codebook &codebook, const RoundedCodebook &rounded) {
  CHECK(std::isnormal(rounded.unit));
  float largest = 0;
  for (const float entry : codebook)
    if (std::isfinite(entry)) largest = std::max(largest, std::fabs(entry));
  const std::vector<double> values = values_of<T>(rounded);
  for (int i = 0; i < kCodebookSize; ++i) {
    const float entry = codebook[i];
    INFO("entry " << i << " is " << entry << ", rounded " << values[i]);
    if (!std::isfinite(entry)) {
      CHECK((std::isnan(entry) ? std::isnan(values[i]) : values[i] == entry));
      continue;
    }
    CHECK(std::signbit(values[i]) == std::signbit(entry));
    // An entry that is small beside the largest one may be a subnormal half.
    const double subnormal = std::is_same_v<T, Half> ? 0x1p-25 : 0x1p-100;
    CHECK(std::fabs(values[i] - entry) <=
          1.000001 * Precision<T>::kHalfUnit * std::fabs(entry) + subnormal * largest);
  }
}

template <class T>
void check_format(const Codebook &codebook, const RoundedCodebook &rounded, const Error &most) {
  check_entries<T>(codebook, rounded);
  for (const int blocksize : {32, 64, 128, 256, 1024, 4096}) {
    const Error error = error_of(codebook, values_of<T>(rounded), count_codes(codebook, blocksize));
    INFO("blocks of " << blocksize << ": rms " << error.rms << ", mean " << error.mean);
    CHECK(error.rms <= most.rms);
    CHECK(std::fabs(error.mean) <= most.mean);
  }
}

// The root mean square, over random codebooks that span [-1, 1], of the mean error: of entries
// rounded as they are, and of round_codebook's.
template <class T>
void check_random_codebooks(CodebookKind kind) {
  Rng rng(0xc100000 + static_cast<int>(kind));
  double before = 0, after = 0;
  for (int i = 0; i < 30; ++i) {
    Codebook codebook = to_codebook(random_codebook(rng, kind));
    *std::min_element(codebook.begin(), codebook.end()) = -1;
    *std::max_element(codebook.begin(), codebook.end()) = 1;
    const RoundedCodebook rounded = round_codebook<T>(codebook.data());
    check_entries<T>(codebook, rounded);
    const std::vector<double> counts = count_codes(codebook, 64);
    before += std::pow(error_of(codebook, rounded_as_it_is<T>(codebook), counts).mean, 2);
    after += std::pow(error_of(codebook, values_of<T>(rounded), counts).mean, 2);
  }
  INFO("before " << std::sqrt(before / 30) << ", after " << std::sqrt(after / 30));
  CHECK(std::sqrt(after) <= 0.1 * std::sqrt(before));
}

template <class T>
void check_scaled(const Codebook &codebook, float power) {
  Codebook scaled = codebook;
  for (float &entry : scaled) entry *= power;
  const RoundedCodebook a = round_codebook<T>(codebook.data());
  const RoundedCodebook b = round_codebook<T>(scaled.data());
  CHECK(std::equal(std::begin(a.entries), std::end(a.entries), std::begin(b.entries)));
  CHECK(b.unit == a.unit * power);
}

template <class T>
void check_any(const Codebook &codebook) {
  check_entries<T>(codebook, round_codebook<T>(codebook.data()));
}

float around_one(uint16_t entry) {
  const uint32_t bits = 0x3f000000u | uint32_t{entry} << 8;
  float number;
  std::memcpy(&number, &bits, sizeof bits);
  return number;
}

// Within a sixth of half a unit of fp16, so that 0 is 0.
void check_around_one(const Codebook &codebook, const RoundedCodebook &rounded, const Error &most) {
  std::vector<double> values;
  for (int i = 0; i < kCodebookSize; ++i) {
    values.push_back((double{around_one(rounded.entries[i])} - 1) * rounded.unit);
    INFO("entry " << i << " is " << codebook[i] << ", around one " << values[i]);
    CHECK(std::fabs(values[i] - codebook[i]) <=
          Precision<Half>::kHalfUnit / 6 * std::fabs(codebook[i]));
  }
  for (const int blocksize : {64, 1024}) {
    const Error error = error_of(codebook, values, count_codes(codebook, blocksize));
    INFO("blocks of " << blocksize << ": rms " << error.rms << ", mean " << error.mean);
    CHECK(error.rms <= most.rms);
    CHECK(std::fabs(error.mean) <= most.mean);
  }
}

// The weights of 1, -1 and 0, as the kernels make them, for each scale that is a number of fp16.
void check_largest_around_one(const Codebook &codebook, const RoundedCodebook &rounded) {
  for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const float exact = to_float(Half{static_cast<uint16_t>(bits)}), scale = exact * rounded.unit;
    for (int i = 0; i < kCodebookSize; ++i) {
      if (codebook[i] != 0 && std::fabs(codebook[i]) != 1) continue;
      const float weight = std::fma(around_one(rounded.entries[i]), scale, -scale);
      if (to_float(from_float<Half>(weight)) != codebook[i] * exact)
        FAIL("entry " << i << " times " << exact << " is " << weight);
    }
  }
}

}  // namespace

TEST_CASE("the formats' codebooks in 16 bits have errors that cancel", "[core][accuracy]") {
  const Error none{5e-8, 5e-8};
  for (const Format &format : kFormats) {
    INFO(format.name);
    const bool nf4 = format.id == NF4_FORMAT_NF4;  // the others' entries are short numbers
    check_format<BFloat16>(format.codebook, format.bf16, nf4 ? Error{1.4e-3, 1.8e-5} : none);
    check_format<Half>(format.codebook, format.fp16, nf4 ? Error{1.6e-4, 1e-6} : none);
    check_entries<Half>(format.codebook, format.fp16_with_one);
    CHECK(format.fp16_with_one.unit == 1);
    check_around_one(format.codebook, format.around_one, nf4 ? Error{4e-5, 2e-6} : none);
    check_largest_around_one(format.codebook, format.around_one);
  }
  const Format &nf4 = kFormats[format_row(NF4_FORMAT_NF4)];
  check_format<Half>(nf4.codebook, nf4.fp16_with_one, {2.5e-4, 1e-5});
}

TEST_CASE("a caller's codebook in 16 bits has errors that nearly cancel", "[core][accuracy]") {
  for (const CodebookKind kind : {CodebookKind::kSorted, CodebookKind::kShuffled}) {
    check_random_codebooks<BFloat16>(kind);
    check_random_codebooks<Half>(kind);
  }
}

TEST_CASE("a power of two in the codebook goes to the unit", "[core]") {
  Rng rng(0xc200000);
  for (int i = 0; i < 20; ++i) {
    const Codebook codebook = to_codebook(random_codebook(rng, CodebookKind::kSorted));
    for (const float power : {0x1p-100f, 0x1p-1f, 0x1p100f}) {
      check_scaled<BFloat16>(codebook, power);
      check_scaled<Half>(codebook, power);
    }
  }
}

TEST_CASE("any codebook is rounded to 16 bits", "[core]") {
  Rng rng(0xc300000);
  std::vector<Codebook> codebooks;
  for (int i = 0; i < 300; ++i)
    for (const CodebookKind kind : {CodebookKind::kDuplicates, CodebookKind::kWild})
      codebooks.push_back(to_codebook(random_codebook(rng, kind)));
  for (const float magnitude : {FLT_MAX, 1e30f, 1e-30f, FLT_MIN, 1e-40f, 0.0f}) {
    Codebook codebook = kNf4Codebook;
    for (float &entry : codebook) entry *= magnitude;
    codebooks.push_back(codebook);
    codebook[3] = kNaN;
    codebook[0] = -kInfinity;
    codebook[9] = kInfinity;
    codebooks.push_back(codebook);
  }
  // To one side, all equal, all but one 0, and nothing that is finite.
  codebooks.push_back({0, 0.1f, 0.15f, 0.3f, 0.35f, 0.4f, 0.5f, 0.6f, 0.7f, 0.8f, 1, 3, 5, 6, 7});
  codebooks.emplace_back().fill(-0.3f);
  codebooks.emplace_back().fill(0);
  codebooks.back()[5] = 0.7f;
  codebooks.emplace_back().fill(kNaN);
  for (const Codebook &codebook : codebooks) {
    check_any<BFloat16>(codebook);
    check_any<Half>(codebook);
  }
}
