#include "cpu/backend.hpp"

#include <algorithm>
#include <iterator>

#include "cpu/float_environment.hpp"
#include "cpu/parallel.hpp"
#include "cpu/reference.hpp"

namespace nf4::cpu {
namespace {

bool always() { return true; }

constexpr Variant kVariants[] = {
    {"scalar", always, dequant_reference, quantize_reference},
};

const Variant *forced_variant = nullptr;

const Variant &best_variant() {
  static const Variant *const best =
      std::find_if(std::begin(kVariants), std::end(kVariants),
                   [](const Variant &variant) { return variant.supported(); });
  return *best;
}

// Work below this many elements is not worth a thread.
constexpr int64_t kElementsPerThread = 1 << 17;

int64_t blocks_per_thread(const Weight &weight) {
  return std::max<int64_t>(1, kElementsPerThread >> weight.blocksize_log2);
}

}  // namespace

VariantList variants() { return {kVariants, static_cast<int>(std::size(kVariants))}; }

const Variant &variant_in_use() {
  return forced_variant != nullptr ? *forced_variant : best_variant();
}

void force_variant(const Variant *variant) { forced_variant = variant; }

void dequant(const DequantProblem &problem, int threads) {
  const DefaultFloatEnvironment environment;
  const Variant &variant = variant_in_use();
  parallel_for(problem.weight.blocks, blocks_per_thread(problem.weight), threads,
               [&](int64_t begin, int64_t end) { variant.dequant(problem, {begin, end}); });
}

void quantize(const QuantizeProblem &problem, int threads) {
  const DefaultFloatEnvironment environment;
  const Variant &variant = variant_in_use();
  const Weight &weight = problem.weight;
  float *scales = static_cast<float *>(weight.nested() ? problem.workspace : weight.absmax);
  parallel_for(weight.blocks, blocks_per_thread(weight), threads, [&](int64_t begin, int64_t end) {
    variant.quantize(problem, scales, {begin, end});
  });
  if (weight.nested()) quantize_scales_reference(weight, scales);
}

}  // namespace nf4::cpu
