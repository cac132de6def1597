// Random tables, scales and inputs, ordinary and nasty.
#pragma once

#include <cstdint>
#include <vector>

#include "nf4/nf4.h"
#include "support/cases.hpp"

namespace nf4::test {

// 16 floats, or none for the formats' own codebooks.
std::vector<float> random_codebook(Rng &rng, CodebookKind kind);

// 256 ascending floats: bitsandbytes' own or others.
std::vector<float> random_scale_code(Rng &rng);

// Mostly ordinary scales; some lists also have NaN, infinite, negative, subnormal or zero scales.
std::vector<float> random_scales(Rng &rng, size_t count);

// `elements` numbers of `dtype`. Each block is of one kind: ordinary, zero, all equal, subnormal,
// huge, any bits, exactly on the ties of `codebook`, or ordinary with a few NaN and infinities.
std::vector<uint8_t> random_input(Rng &rng, nf4_dtype dtype, int blocksize, int64_t elements,
                                  const float *codebook);

}  // namespace nf4::test
