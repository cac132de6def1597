#include "cpu/backend.hpp"

#if defined(NF4_AVX2)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cmath>
#include <iterator>

#include "cpu/call_environment.hpp"
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

// The rows of several matmuls' weights, one after the other, in pieces: a range to be split in
// units of work, of which a piece of a large product has more than one of a small.
class Pieces {
 public:
  Pieces(const MatmulProblem *problems, int count) : problems_(problems), count_(count) {
    double all = 0, least = INFINITY;
    for (int i = 0; i < count; ++i) {
      if (problems[i].empty()) continue;
      all += work_of_piece(problems[i]) * static_cast<double>(pieces_of(problems[i]));
      least = std::min(least, work_of_piece(problems[i]));
    }
    // Not so fine that 64 bits would not hold all units.
    work_of_unit_ = std::max(least, all * 0x1p-50);
    for (int i = 0; i < count; ++i) {
      const MatmulProblem &problem = problems[i];
      Product &product = products_[i];
      product.first = i == 0 ? 0 : products_[i - 1].last;
      product.units_of_piece = std::max<int64_t>(
          1, problem.empty() ? 1 : static_cast<int64_t>(work_of_piece(problem) / work_of_unit_));
      product.last = product.first + pieces_of(problem) * product.units_of_piece;
    }
  }

  int64_t units() const { return products_[count_ - 1].last; }
  int64_t units_per_thread() const {
    return std::max<int64_t>(1, static_cast<int64_t>(kMatmulProductsPerThread / work_of_unit_));
  }

  // The pieces whose first unit is among these.
  void for_each(int64_t begin, int64_t end, decltype(Variant::matmul) matmul) const {
    for (int i = 0; i < count_ && products_[i].first < end; ++i) {
      const int64_t first = products_[i].piece_at(begin), last = products_[i].piece_at(end);
      if (first == last) continue;
      const int64_t rows = problems_[i].weight.rows;
      matmul(problems_[i], {first * kRowsOfPiece, std::min(rows, last * kRowsOfPiece)});
    }
  }

 private:
  struct Product {
    int64_t first, last;  // of its units
    int64_t units_of_piece;

    // The first piece that begins at a unit or after it.
    int64_t piece_at(int64_t unit) const {
      return ceil_divide(std::clamp(unit, first, last) - first, units_of_piece);
    }
  };

  static int64_t pieces_of(const MatmulProblem &problem) {
    return problem.empty() ? 0 : ceil_divide(problem.weight.rows, kRowsOfPiece);
  }
  // Multiplications; where there are no columns, what is stored.
  static double work_of_piece(const MatmulProblem &problem) {
    return static_cast<double>(problem.m) * std::max<int64_t>(1, problem.weight.cols) *
           kRowsOfPiece;
  }

  const MatmulProblem *problems_;
  int count_;
  double work_of_unit_;
  Product products_[NF4_MATMUL_BATCH_MAX];
};

}  // namespace

VariantList variants() { return {kVariants, static_cast<int>(std::size(kVariants))}; }

const Variant &variant_in_use() {
  return forced_variant != nullptr ? *forced_variant : best_variant();
}

void force_variant(const Variant *variant) { forced_variant = variant; }

void dequant(const DequantProblem &problem, int threads) {
  const CallEnvironment environment;
  const Variant &variant = variant_in_use();
  parallel_for(problem.weight.blocks, blocks_per_thread(problem.weight, kDequantElementsPerThread),
               threads,
               [&](int64_t begin, int64_t end) { variant.dequant(problem, {begin, end}); });
}

void quantize(const QuantizeProblem &problem, int threads) {
  const CallEnvironment environment;
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
  const CallEnvironment environment;
  const Variant &variant = variant_in_use();
  const Pieces pieces(problems, count);
  parallel_for(pieces.units(), pieces.units_per_thread(), threads,
               [&](int64_t begin, int64_t end) { pieces.for_each(begin, end, variant.matmul); });
}

}  // namespace nf4::cpu
