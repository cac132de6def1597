// The scalar reference against naive code for nf4.h's formulas.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/decode.hpp"
#include "core/encode.hpp"
#include "core/float16.hpp"
#include "cpu/backend.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/force.hpp"
#include "support/placed.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

// volatile: each operation rounds, whatever the flags of this file.
float scale_of(const nf4_tensor &weight, int64_t element) {
  const int64_t block = element / weight.blocksize;
  if (weight.nested_blocksize == 0) return static_cast<const float *>(weight.absmax)[block];
  const float code = weight.nested_code[static_cast<const uint8_t *>(weight.absmax)[block]];
  volatile float product = code * weight.nested_absmax[block / weight.nested_blocksize];
  return product + *weight.nested_offset;
}

float value_of(const nf4_tensor &weight, int64_t element) {
  const int byte = static_cast<const uint8_t *>(weight.packed)[element / 2];
  const int code = element % 2 == 0 ? byte / 16 : byte % 16;
  const float *codebook = weight.codebook ? weight.codebook : nf4_codebook(weight.format);
  return codebook[code] * scale_of(weight, element);
}

bool holds(const void *out, nf4_dtype dtype, int64_t i, float value) {
  if (dtype == NF4_DTYPE_FP32)
    return first_difference(dtype, static_cast<const float *>(out) + i, &value, 1) == kNoDifference;
  const uint16_t bits = dtype == NF4_DTYPE_FP16 ? float_to_half(value) : float_to_bf16(value);
  return first_difference(dtype, static_cast<const uint16_t *>(out) + i, &bits, 1) == kNoDifference;
}

float input_of(const QuantizeCase &input, int64_t i) {
  if (input.dtype == NF4_DTYPE_FP32) return reinterpret_cast<const float *>(input.in.data())[i];
  const uint16_t bits = reinterpret_cast<const uint16_t *>(input.in.data())[i];
  return input.dtype == NF4_DTYPE_FP16 ? half_to_float(bits) : bf16_to_float(bits);
}

// The scales of a quantize case, by their definition.
std::vector<float> absmax_of(const QuantizeCase &input) {
  std::vector<float> absmax;
  for (int64_t i = 0; i < input.weight.elements(); ++i) {
    if (i % input.weight.shape.blocksize == 0) absmax.push_back(0);
    const float x = std::fabs(input_of(input, i));
    if (std::isfinite(x) && x > absmax.back()) absmax.back() = x;
  }
  return absmax;
}

// How far a number in [-1, 1] can be from the nearest of 256 ascending ones.
double largest_distance(const float *code) {
  double distance = std::max(code[0] + 1.0, 1.0 - code[255]);
  for (int i = 1; i < 256; ++i) distance = std::max(distance, (double{code[i]} - code[i - 1]) / 2);
  return distance;
}

}  // namespace

TEST_CASE("the reference dequantizes as nf4.h says", "[reference]") {
  const ForcedVariant forced(scalar_variant());
  uint64_t stream = 0x100000;
  for (const CaseClass &kind : case_classes()) {
    for (int i = 0; i < kCodebookKindCount; ++i) {
      const CodebookKind codebook = codebook_kind(i);
      Rng rng(++stream);
      const DequantCase test =
          random_dequant_case(rng, kind, codebook, random_elements(rng, kind.blocksize));
      INFO(describe(test.weight, test.dtype, stream));
      const PlacedWeight weight(rng, test.weight);
      const GuardedBuffer out = random_buffer(rng, test.out_bytes(), dtype_bytes(test.dtype));
      REQUIRE(nf4_dequant_cpu(&weight.tensor(), out.data(), test.dtype, 1) == NF4_STATUS_OK);
      int64_t wrong = 0;
      for (int64_t i = 0; i < test.weight.elements(); ++i)
        wrong += !holds(out.data(), test.dtype, i, value_of(weight.tensor(), i));
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("the reference quantizes as nf4.h says", "[reference]") {
  const ForcedVariant forced(scalar_variant());
  uint64_t stream = 0x200000;
  for (const CaseClass &kind : case_classes()) {
    if (kind.nested) continue;
    for (int i = 0; i < kCodebookKindCount; ++i) {
      const CodebookKind codebook = codebook_kind(i);
      if (!is_format(codebook) && codebook != CodebookKind::kShuffled) continue;
      Rng rng(++stream);
      const QuantizeCase test =
          random_quantize_case(rng, kind, codebook, random_elements(rng, kind.blocksize));
      INFO(describe(test.weight, test.dtype, stream));
      const PlacedWeight weight(rng, test.weight);
      REQUIRE(nf4_quantize_cpu(test.in.data(), test.dtype, &weight.tensor(), nullptr, 0, 1) ==
              NF4_STATUS_OK);
      const std::vector<float> absmax = absmax_of(test);
      CHECK(first_difference(weight.data(kAbsmax), absmax.data(),
                             static_cast<int64_t>(absmax.size() * sizeof(float))) == kNoDifference);
      const float *entries = weight.tensor().codebook ? weight.tensor().codebook
                                                      : nf4_codebook(weight.tensor().format);
      const Quantizer quantizer = make_quantizer(entries);
      int64_t wrong = 0;
      for (int64_t i = 0; i < test.weight.elements(); ++i) {
        const float inverse = inverse_scale(absmax[i / kind.blocksize]);
        wrong +=
            unpack_code(weight.data(kPacked), i) != encode(quantizer, input_of(test, i), inverse);
      }
      CHECK(wrong == 0);
      if (test.weight.elements() % 2 == 1)
        CHECK(unpack_code(weight.data(kPacked), test.weight.elements()) == 0);
    }
  }
}

TEST_CASE("nested quantize: the offset is the mean, the scales survive to 8 bits", "[reference]") {
  const ForcedVariant forced(scalar_variant());
  Rng rng(0x300000);
  const CaseClass kind{NF4_DTYPE_FP32, 64, true};
  for (int i = 0; i < 20; ++i) {
    QuantizeCase test = random_quantize_case(rng, kind, CodebookKind::kNf4, rng.between(1, 30000));
    auto *in = reinterpret_cast<float *>(test.in.data());
    for (int64_t j = 0; j < test.weight.elements(); ++j) in[j] = rng.normal();
    const PlacedWeight weight(rng, test.weight);
    const GuardedBuffer workspace = random_buffer(rng, test.workspace_bytes, 16);
    REQUIRE(nf4_quantize_cpu(in, test.dtype, &weight.tensor(), workspace.data(),
                             test.workspace_bytes, 1) == NF4_STATUS_OK);
    const std::vector<float> absmax = absmax_of(test);
    double sum = 0;
    for (const float x : absmax) sum += x;
    CHECK(*weight.tensor().nested_offset ==
          Approx(sum / static_cast<double>(absmax.size())).epsilon(1e-6));
    const nf4_tensor &tensor = weight.tensor();
    const double distance = largest_distance(tensor.nested_code);
    int64_t wrong = 0;
    for (size_t j = 0; j < absmax.size(); ++j) {
      const double error = std::fabs(scale_of(tensor, static_cast<int64_t>(j) * 64) - absmax[j]);
      wrong += error > distance * tensor.nested_absmax[j / tensor.nested_blocksize] + 1e-6;
    }
    CHECK(wrong == 0);
  }
}
