#include "cpu/backend.hpp"

#if defined(NF4_AVX2)
#include <cpuid.h>
#endif

#include <algorithm>
#include <iterator>

#include "cpu/float_environment.hpp"
#include "cpu/matmul.hpp"
#include "cpu/parallel.hpp"
#include "cpu/quantize_scales.hpp"
#include "cpu/reference.hpp"
#include "cpu/vector.hpp"

namespace nf4::cpu {
namespace {

bool always() { return true; }

// Instructions that the files of the variants are compiled for; the operating system's
// part (saved registers) is in __builtin_cpu_supports.
#if defined(NF4_AVX512)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif
#if defined(NF4_AVX512BF16)
bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif
#if defined(NF4_AVX2)
bool has_avx2() {
  // Not every compiler's __builtin_cpu_supports knows "f16c".
  unsigned a, b, c, d;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
}
#endif

constexpr Variant kVariants[] = {
#if defined(NF4_AVX512BF16)
    {"avx512bf16", has_avx512bf16, dequant_with<kAvx512Kernels>, quantize_with<kAvx512Kernels>,
     quantize_scales_with<kAvx512Kernels>,
     matmul_with<kAvx512Kernels, kAvx512Matmul, &kAvx512Bf16Matmul>},
#endif
#if defined(NF4_AVX512)
    {"avx512", has_avx512, dequant_with<kAvx512Kernels>, quantize_with<kAvx512Kernels>,
     quantize_scales_with<kAvx512Kernels>, matmul_with<kAvx512Kernels, kAvx512Matmul>},
#endif
#if defined(NF4_AVX2)
    {"avx2", has_avx2, dequant_with<kAvx2Kernels>, quantize_with<kAvx2Kernels>,
     quantize_scales_with<kAvx2Kernels>, matmul_with<kAvx2Kernels, kAvx2Matmul>},
#endif
    {"scalar", always, dequant_reference, quantize_reference, quantize_scales_reference,
     matmul_reference},
};

const Variant *forced_variant = nullptr;

const Variant &best_variant() {
  static const Variant *const best =
      std::find_if(std::begin(kVariants), std::end(kVariants),
                   [](const Variant &variant) { return variant.supported(); });
  return *best;
}

// Less work than this, about 50 microseconds for the vector variants, is not worth a thread.
constexpr int64_t kDequantElementsPerThread = 1 << 20;
constexpr int64_t kQuantizeElementsPerThread = 1 << 18;
constexpr int64_t kMatmulProductsPerThread = 1 << 20;
// Pieces of matmul are of so many rows: what a kernel does together.
constexpr int64_t kRowsOfPiece = 16;

int64_t blocks_per_thread(const Weight &weight, int64_t elements_per_thread) {
  return std::max<int64_t>(1, elements_per_thread >> weight.blocksize_log2);
}

// The rows of several matmuls' weights, one after the other, in pieces.
class Pieces {
 public:
  Pieces(const MatmulProblem *problems, int count) : problems_(problems) {
    for (int i = 0; i < count; ++i) {
      const MatmulProblem &problem = problems[i];
      const int64_t pieces = problem.empty() ? 0 : ceil_divide(problem.weight.rows, kRowsOfPiece);
      const double of_piece = static_cast<double>(problem.m) * problem.weight.cols * kRowsOfPiece;
      products_ += static_cast<double>(pieces) * of_piece;
      ends_[i] = (i == 0 ? 0 : ends_[i - 1]) + pieces;
    }
    count_ = ends_[count - 1];
  }

  int64_t count() const { return count_; }
  // How many are worth a thread, of pieces of the mean size.
  int64_t per_thread() const {
    const double of_piece = std::max(1.0, products_ / static_cast<double>(count_));
    return std::max<int64_t>(1, static_cast<int64_t>(kMatmulProductsPerThread / of_piece));
  }

  void for_each(int64_t begin, int64_t end, decltype(Variant::matmul) matmul) const {
    for (int i = 0; begin < end; ++i) {
      const int64_t first = i == 0 ? 0 : ends_[i - 1], last = std::min(end, ends_[i]);
      if (begin >= last) continue;
      const int64_t rows = problems_[i].weight.rows;
      matmul(problems_[i],
             {(begin - first) * kRowsOfPiece, std::min(rows, (last - first) * kRowsOfPiece)});
      begin = last;
    }
  }

 private:
  const MatmulProblem *problems_;
  int64_t ends_[NF4_MATMUL_BATCH_MAX];
  int64_t count_;
  double products_ = 0;
};

}  // namespace

VariantList variants() { return {kVariants, static_cast<int>(std::size(kVariants))}; }

const Variant &variant_in_use() {
  return forced_variant != nullptr ? *forced_variant : best_variant();
}

void force_variant(const Variant *variant) { forced_variant = variant; }

void dequant(const DequantProblem &problem, int threads) {
  const DefaultFloatEnvironment environment;
  const Variant &variant = variant_in_use();
  parallel_for(problem.weight.blocks, blocks_per_thread(problem.weight, kDequantElementsPerThread),
               threads,
               [&](int64_t begin, int64_t end) { variant.dequant(problem, {begin, end}); });
}

void quantize(const QuantizeProblem &problem, int threads) {
  const DefaultFloatEnvironment environment;
  const Variant &variant = variant_in_use();
  const Weight &weight = problem.weight;
  float *scales = static_cast<float *>(weight.nested() ? problem.workspace : weight.absmax);
  parallel_for(
      weight.blocks, blocks_per_thread(weight, kQuantizeElementsPerThread), threads,
      [&](int64_t begin, int64_t end) { variant.quantize(problem, scales, {begin, end}); });
  if (!weight.nested()) return;
  auto *partial_sums = reinterpret_cast<double *>(static_cast<char *>(problem.workspace) +
                                                  QuantizeWorkspace(weight).scales_bytes);
  variant.quantize_scales(weight, scales, partial_sums, threads);
}

void matmul(const MatmulProblem *problems, int count, int threads) {
  const DefaultFloatEnvironment environment;
  const Variant &variant = variant_in_use();
  const Pieces pieces(problems, count);
  parallel_for(pieces.count(), pieces.per_thread(), threads,
               [&](int64_t begin, int64_t end) { pieces.for_each(begin, end, variant.matmul); });
}

}  // namespace nf4::cpu
