#include "support/values.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/float16.hpp"

namespace nf4::test {
namespace {

using Limits = std::numeric_limits<float>;

constexpr float kSpecials[] = {
    Limits::quiet_NaN(),
    __builtin_nanf("0x3fffff"),  // every bit set but the sign
    Limits::infinity(),
    -Limits::infinity(),
    0.0f,
    -0.0f,
    Limits::max(),
    -Limits::max(),
    Limits::min(),
    Limits::denorm_min(),
    -1e-40f,
    -0.75f,
};

enum class BlockKind { kOrdinary, kZero, kEqual, kSubnormal, kHuge, kAnyBits, kTies, kSprinkled };
constexpr BlockKind kBlockKinds[] = {
    BlockKind::kOrdinary,  BlockKind::kOrdinary, BlockKind::kOrdinary, BlockKind::kZero,
    BlockKind::kEqual,     BlockKind::kHuge,     BlockKind::kAnyBits,  BlockKind::kTies,
    BlockKind::kSprinkled, BlockKind::kSubnormal};

// A power of two as the absmax keeps normalising exact, so the ties stay ties.
float tie_or_neighbour(Rng &rng, const float *codebook, float absmax) {
  const float a = codebook[rng.below(16)];
  const float b = codebook[rng.below(16)];
  const float tie = 0.5f * (a + b);
  const float neighbours[] = {tie, std::nextafter(tie, -2.0f), std::nextafter(tie, 2.0f), 1.0f};
  return rng.pick(neighbours) * absmax;
}

float random_value(Rng &rng, BlockKind kind, float magnitude, const float *codebook) {
  switch (kind) {
    case BlockKind::kZero:
      return rng.one_in(2) ? 0.0f : -0.0f;
    case BlockKind::kEqual:
      return magnitude;
    case BlockKind::kSubnormal:
      return rng.normal() * 1e-39f;
    case BlockKind::kHuge:
      return std::min(1.0f, std::max(-1.0f, rng.normal())) * Limits::max();
    case BlockKind::kAnyBits:
      return rng.any_float();
    case BlockKind::kTies:
      return tie_or_neighbour(rng, codebook, magnitude);
    case BlockKind::kSprinkled:
      return rng.one_in(10) ? rng.pick(kSpecials) : rng.normal() * magnitude;
    case BlockKind::kOrdinary:
      break;
  }
  return rng.normal() * magnitude;
}

void store(uint8_t *out, nf4_dtype dtype, float x) {
  if (dtype == NF4_DTYPE_FP32) {
    std::memcpy(out, &x, 4);
  } else {
    const uint16_t bits = dtype == NF4_DTYPE_FP16 ? float_to_half(x) : float_to_bf16(x);
    std::memcpy(out, &bits, 2);
  }
}

}  // namespace

std::vector<float> random_codebook(Rng &rng, CodebookKind kind) {
  if (is_format(kind)) return {};
  std::vector<float> codebook(16);
  for (float &entry : codebook) {
    entry = 2 * rng.uniform() - 1;
    if (kind == CodebookKind::kDuplicates) entry = static_cast<float>(rng.between(-3, 3)) / 3;
    if (kind == CodebookKind::kDuplicates && entry == 0 && rng.one_in(2)) entry = -0.0f;
    if (kind == CodebookKind::kWild) entry = rng.one_in(2) ? rng.any_float() : rng.pick(kSpecials);
  }
  if (kind == CodebookKind::kSorted) std::sort(codebook.begin(), codebook.end());
  return codebook;
}

std::vector<float> random_scale_code(Rng &rng) {
  std::vector<float> code(nf4_scale_code(), nf4_scale_code() + 256);
  if (rng.one_in(3)) {
    for (float &entry : code) entry = 2 * rng.uniform() - 1;
    if (rng.one_in(2)) std::fill_n(code.begin(), 60, code[60]);
    std::sort(code.begin(), code.end());
  }
  return code;
}

std::vector<float> random_scales(Rng &rng, size_t count) {
  const float magnitude = std::ldexp(1.0f, static_cast<int>(rng.between(-20, 4)));
  const bool nasty = rng.one_in(4);
  std::vector<float> scales(count);
  for (float &scale : scales) {
    scale = std::fabs(rng.normal()) * magnitude;
    if (nasty && rng.one_in(3)) scale = rng.one_in(3) ? rng.any_float() : rng.pick(kSpecials);
  }
  return scales;
}

std::vector<uint8_t> random_input(Rng &rng, nf4_dtype dtype, int blocksize, int64_t elements,
                                  const float *codebook) {
  const int bytes = dtype_bytes(dtype);
  std::vector<uint8_t> in(elements * bytes);
  BlockKind kind{};
  float magnitude = 0;
  for (int64_t i = 0; i < elements; ++i) {
    if (i % blocksize == 0) {
      kind = rng.pick(kBlockKinds);
      magnitude = std::ldexp(kind == BlockKind::kTies ? 1.0f : 0.5f + rng.uniform(),
                             static_cast<int>(rng.between(-12, 3)));
    }
    store(&in[i * bytes], dtype, random_value(rng, kind, magnitude, codebook));
  }
  return in;
}

}  // namespace nf4::test
