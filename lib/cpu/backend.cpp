#include "cpu/backend.hpp"

#if defined(NF4_AVX2)
#include <cpuid.h>
#endif
#if defined(NF4_NEONBF16)
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <iterator>

#include "core/formats.hpp"
#include "core/int4.hpp"
#include "cpu/call_environment.hpp"
#include "cpu/dequant/dequant.hpp"
#include "cpu/matmul/matmul.hpp"
#include "cpu/matmul/partition.hpp"
#include "cpu/parallel.hpp"
#include "cpu/quantize/nested.hpp"
#include "cpu/quantize/quantize.hpp"
#include "cpu/reference.hpp"

namespace nf4::cpu {
namespace {

bool always() { return true; }

// Tells whether the machine has the instructions that a variant's files are compiled for.
// __builtin_cpu_supports also checks that the operating system saves their registers.
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

#if defined(NF4_NEONBF16)
bool has_neonbf16() {
  constexpr unsigned long kBf16 = 1 << 14;  // HWCAP2_BF16, which older headers lack
  return (getauxval(AT_HWCAP2) & kBf16) != 0;
}
#endif

constexpr Variant kVariants[] = {
#if defined(NF4_AVX512BF16)
    {"avx512bf16",
     has_avx512bf16,
     dequant_with<kAvx512Dequant>,
     quantize_with<kAvx512Quantize>,
     quantize_scales_with<kAvx512Quantize>,
     bf16_codebook_for,
     matmul_with<kAvx512Dequant, kAvx512Matmul, &kAvx512Bf16Matmul>,
     matmul_grad_with<kAvx512Dequant, kAvx512Matmul, &kAvx512Bf16Matmul>,
     lora_product_with<kAvx512Dequant, kAvx512Matmul, &kAvx512Bf16Matmul>,
     lora_grad_with<kAvx512Matmul>,
     {int4_dequant_with<kAvx512Dequant>, int4_quantize_with<kAvx512Dequant, kAvx512Quantize>,
      int4_matmul_with<kAvx512Dequant, kAvx512Matmul, &kAvx512Bf16Matmul>}},
#endif
#if defined(NF4_AVX512)
    {"avx512",
     has_avx512,
     dequant_with<kAvx512Dequant>,
     quantize_with<kAvx512Quantize>,
     quantize_scales_with<kAvx512Quantize>,
     nullptr,
     matmul_with<kAvx512Dequant, kAvx512Matmul>,
     matmul_grad_with<kAvx512Dequant, kAvx512Matmul>,
     lora_product_with<kAvx512Dequant, kAvx512Matmul>,
     lora_grad_with<kAvx512Matmul>,
     {int4_dequant_with<kAvx512Dequant>, int4_quantize_with<kAvx512Dequant, kAvx512Quantize>,
      int4_matmul_with<kAvx512Dequant, kAvx512Matmul>}},
#endif
#if defined(NF4_AVX2)
    {"avx2",
     has_avx2,
     dequant_with<kAvx2Dequant>,
     quantize_with<kAvx2Quantize>,
     quantize_scales_with<kAvx2Quantize>,
     bf16_codebook_for,
     matmul_with<kAvx2Dequant, kAvx2Matmul, &kAvx2MatmulOfBf16>,
     matmul_grad_with<kAvx2Dequant, kAvx2Matmul, &kAvx2MatmulOfBf16>,
     lora_product_with<kAvx2Dequant, kAvx2Matmul, &kAvx2MatmulOfBf16>,
     lora_grad_with<kAvx2Matmul>,
     {int4_dequant_with<kAvx2Dequant>, int4_quantize_with<kAvx2Dequant, kAvx2Quantize>,
      int4_matmul_with<kAvx2Dequant, kAvx2Matmul, &kAvx2MatmulOfBf16>}},
#endif
#if defined(NF4_NEONBF16)
    {"neonbf16",
     has_neonbf16,
     dequant_with<kNeonDequant>,
     quantize_with<kNeonQuantize>,
     quantize_scales_with<kNeonQuantize>,
     bf16_codebook_for,
     matmul_with<kNeonDequant, kNeonMatmul, &kNeonBf16Matmul>,
     matmul_grad_with<kNeonDequant, kNeonMatmul, &kNeonBf16Matmul>,
     lora_product_with<kNeonDequant, kNeonMatmul, &kNeonBf16Matmul>,
     lora_grad_with<kNeonMatmul>,
     {int4_dequant_with<kNeonDequant>, int4_quantize_with<kNeonDequant, kNeonQuantize>,
      int4_matmul_with<kNeonDequant, kNeonMatmul, &kNeonBf16Matmul>}},
#endif
#if defined(NF4_NEON)
    {"neon",
     always,
     dequant_with<kNeonDequant>,
     quantize_with<kNeonQuantize>,
     quantize_scales_with<kNeonQuantize>,
     bf16_codebook_for,
     matmul_with<kNeonDequant, kNeonMatmul, &kNeonMatmulOfBf16>,
     matmul_grad_with<kNeonDequant, kNeonMatmul, &kNeonMatmulOfBf16>,
     lora_product_with<kNeonDequant, kNeonMatmul, &kNeonMatmulOfBf16>,
     lora_grad_with<kNeonMatmul>,
     {int4_dequant_with<kNeonDequant>, int4_quantize_with<kNeonDequant, kNeonQuantize>,
      int4_matmul_with<kNeonDequant, kNeonMatmul, &kNeonMatmulOfBf16>}},
#endif
    {"scalar",
     always,
     dequant_reference,
     quantize_reference,
     quantize_scales_reference,
     nullptr,
     matmul_reference,
     matmul_grad_reference,
     lora_product_reference,
     lora_grad_reference,
     {int4_dequant_reference, int4_quantize_reference, int4_matmul_reference}},
};

const Variant *forced_variant = nullptr;

const Variant &best_variant() {
  static const Variant *const best =
      std::find_if(std::begin(kVariants), std::end(kVariants),
                   [](const Variant &variant) { return variant.supported(); });
  return *best;
}

// A thread is not worth starting for less work than this: about 50 microseconds for the vector
// variants.
constexpr int64_t kDequantElementsPerThread = 1 << 20;
constexpr int64_t kQuantizeElementsPerThread = 1 << 18;
constexpr int64_t kProductsPerThread = 1 << 20;

int64_t blocks_per_thread(const Weight &weight, int64_t elements_per_thread) {
  return std::max<int64_t>(1, elements_per_thread >> weight.blocksize_log2);
}

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
  if (weight.has_scale_bytes())
    return parallel_for(weight.blocks, blocks_per_thread(weight, kQuantizeElementsPerThread),
                        threads,
                        [&](int64_t begin, int64_t end) { quantize_e2m1(problem, {begin, end}); });
  float *scales = static_cast<float *>(weight.nested() ? problem.workspace : weight.absmax);
  parallel_for(
      weight.blocks, blocks_per_thread(weight, kQuantizeElementsPerThread), threads,
      [&](int64_t begin, int64_t end) { variant.quantize(problem, scales, {begin, end}); });
  if (!weight.nested()) return;
  auto *partial_sums = reinterpret_cast<double *>(static_cast<char *>(problem.workspace) +
                                                  QuantizeWorkspace(weight).scales_bytes);
  variant.quantize_scales(weight, scales, partial_sums, threads);
}

// Computes the adapter's product, which the matmul and the gradient read.
void lora_product(const MatmulProblem &problem, int threads) {
  if (problem.lora.rank == 0) return;
  const Variant &variant = variant_in_use();
  const int64_t products = problem.lora.rank * problem.x_columns();
  parallel_for(problem.m, std::max<int64_t>(1, kProductsPerThread / products), threads,
               [&](int64_t begin, int64_t end) { variant.lora_product(problem, {begin, end}); });
}

void matmul(const MatmulProblem *problems, int count, int threads) {
  const CallEnvironment environment;
  for (int i = 0; i < count; ++i)
    if (!problems[i].empty()) lora_product(problems[i], threads);
  const Partition partition(problems, count, threads_of(threads));
  RoundedCodebook codebooks[NF4_MATMUL_BATCH_MAX];
  for (int i = 0; i < count; ++i) {
    const Variant &variant = variant_in_use();
    if (!problems[i].empty() && variant.bf16_codebook != nullptr)
      codebooks[i] = variant.bf16_codebook(problems[i]);
  }
  parallel_for(partition.units(), partition.units_per_thread(), threads,
               [&](int64_t begin, int64_t end) {
                 partition.for_each(begin, end, [&](int i, RowRange n) {
                   variant_in_use().matmul(problems[i], codebooks[i], n);
                 });
               });
}

void matmul_grad(const MatmulProblem &problem, int threads) {
  const CallEnvironment environment;
  const Variant &variant = variant_in_use();
  lora_product(problem, threads);
  constexpr int64_t kUnit = 128;
  const int64_t products_of_unit = problem.m * std::max<int64_t>(1, problem.weight.rows) * kUnit;
  parallel_for(ceil_divide(problem.weight.cols, kUnit),
               std::max<int64_t>(1, kProductsPerThread / products_of_unit), threads,
               [&](int64_t begin, int64_t end) {
                 variant.matmul_grad(problem,
                                     {begin * kUnit, std::min(problem.weight.cols, end * kUnit)});
               });
}

void lora_grad(const LoraGradProblem &problem, int threads) {
  const CallEnvironment environment;
  const Variant &variant = variant_in_use();
  constexpr int64_t kUnit = 256;
  // The divisions are one after another because m may be any number if there are no matrices.
  const int64_t units_per_thread =
      kProductsPerThread / kUnit / problem.rank / std::max<int64_t>(1, problem.m);
  for (const LoraGradPart &part : {LoraGradPart{problem, problem.a, problem.a.out_stride, 1},
                                   LoraGradPart{problem, problem.b, 1, problem.b.out_stride}})
    parallel_for(ceil_divide(part.of.columns, kUnit), std::max<int64_t>(1, units_per_thread),
                 threads, [&](int64_t begin, int64_t end) {
                   variant.lora_grad(part, {begin * kUnit, std::min(part.of.columns, end * kUnit)});
                 });
}

// Calls run(rows) on parts of a weight's rows. Each part begins at a multiple of 64, a cache line
// of words.
template <class Run>
void for_rows(const Int4Weight &weight, int64_t elements_per_thread, int threads, const Run &run) {
  constexpr int64_t kUnit = 64;
  const int64_t units = ceil_divide(weight.rows, kUnit);
  const int64_t per_thread = elements_per_thread / (weight.cols * kUnit);
  parallel_for(units, std::max<int64_t>(1, per_thread), threads, [&](int64_t begin, int64_t end) {
    run(RowRange{begin * kUnit, std::min(weight.rows, end * kUnit)});
  });
}

void dequant(const Int4DequantProblem &problem, int threads) {
  const CallEnvironment environment;
  for_rows(problem.weight, kDequantElementsPerThread, threads,
           [&](RowRange n) { variant_in_use().int4.dequant(problem, n); });
}

void quantize(const Int4QuantizeProblem &problem, int threads) {
  const CallEnvironment environment;
  for_rows(problem.weight, kQuantizeElementsPerThread, threads,
           [&](RowRange n) { variant_in_use().int4.quantize(problem, n); });
}

void reorder(const Int4ReorderProblem &problem, int threads) {
  const CallEnvironment environment;
  int4_permutation(problem);
  for_rows(problem.from, kQuantizeElementsPerThread, threads,
           [&](RowRange n) { int4_reorder_reference(problem, n); });
}

void matmul(const Int4MatmulProblem *problems, int count, int threads) {
  const CallEnvironment environment;
  const Partition partition(problems, count, threads_of(threads));
  parallel_for(
      partition.units(), partition.units_per_thread(), threads, [&](int64_t begin, int64_t end) {
        partition.for_each(
            begin, end, [&](int i, RowRange n) { variant_in_use().int4.matmul(problems[i], n); });
      });
}

}  // namespace nf4::cpu
