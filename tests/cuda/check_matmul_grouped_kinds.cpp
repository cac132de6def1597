// Every CUDA kernel of the gradient of grouped products, and of experts of integers, against sums
// in binary64 on random routings.
#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>

#include "support/grouped_kinds.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

// Several tiles along each side, tails, tiles that are nearly empty, CTAs that have several tiles.
constexpr GroupedShape kGradients[] = {{1, 40, 256, 3},   {3, 16, 128, 40},  {7, 200, 192, 21},
                                       {130, 8, 64, 200}, {2, 72, 320, 300}, {60, 64, 640, 300},
                                       {5, 33, 64, 30},   {4, 64, 96, 9}};
constexpr GroupedShape kIntegers[] = {
    {1, 40, 256, 3},    {3, 96, 192, 40}, {7, 32, 512, 21}, {130, 8, 64, 200},  {2, 352, 64, 300},
    {60, 640, 64, 300}, {5, 24, 72, 30},  {3, 40, 4416, 9}, {2, 328, 128, 420}, {40, 320, 768, 40}};

}  // namespace

TEST_CASE("every kernel of the gradient of experts", "[cuda][matmul_grouped]") {
  const Stream stream;
  Counts counts;
  uint64_t number = 0x1a000000;
  for (const nf4_dtype dtype : kDtypes16)
    for (const bool nested : {false, true})
      for (const GroupedShape &shape : kGradients)
        for (const Routing routing : kRoutings) {
          Rng rng(++number);
          if (few_shapes() && number % 9 != 0) continue;
          const int blocksize = shape.n * shape.k % 64 == 0 ? 64 : 32;
          const GroupedRows rows = random_grouped_rows(rng, shape, routing);
          INFO(number << ", dtype " << dtype << (nested ? ", nested, " : ", ") << shape.n << " x "
                      << shape.k << ", " << describe(rows));
          const auto experts = random_experts(rng, {dtype, blocksize, nested}, shape);
          check_product(rng, Product<GradientKind>(rng, experts, dtype, rows), stream, counts);
        }
  check_counts<GradientKind>(counts, few_shapes() ? 1 : 10);
}

TEST_CASE("every kernel of experts of integers", "[cuda][matmul_grouped]") {
  // Of every so many cases one, where few are wanted: of each shape some.
  constexpr uint64_t kOneOf = 9;
  static_assert(std::gcd(kOneOf, std::size(kIntegers)) == 1);
  const Stream stream;
  std::map<nf4_int4_layout, Counts> counts;
  uint64_t number = 0x1a400000;
  for (const Int4Class &kind : int4_classes())
    for (const nf4_dtype dtype : kDtypes16)
      for (const GroupedShape &shape : kIntegers) {
        Rng rng(++number);
        if (few_shapes() && number % kOneOf != 0) continue;
        const int32_t group_size = shape.k % 64 != 0 || rng.one_in(5) ? 8 : rng.one_in(3) ? -1 : 64;
        const GroupedRows rows = random_grouped_rows(rng, shape, rng.pick(kRoutings));
        INFO(number << ", layout " << kind.layout << ", dtype " << dtype << ", " << shape.n << " x "
                    << shape.k << ", groups of " << group_size << ", " << describe(rows));
        const auto experts = random_experts(rng, kind, shape, group_size);
        check_product(rng, Product<IntegerKind>(rng, experts, dtype, rows), stream,
                      counts[kind.layout]);
      }
  check_counts(counts);
}

TEST_CASE("every kernel of the gradient of experts with larger blocks", "[cuda][matmul_grouped]") {
  constexpr GroupedShape kShapes[] = {
      {5, 64, 256, 60}, {3, 192, 128, 40}, {4, 64, 192, 30}, {2, 128, 640, 300}};
  const Stream stream;
  Counts counts;
  uint64_t number = 0x1aa00000;
  for (const nf4_dtype dtype : kDtypes16)
    for (const bool nested : {false, true})
      for (const int blocksize : {128, 512, 4096})
        for (const GroupedShape &shape : kShapes) {
          Rng rng(++number);
          if (shape.n * shape.k % blocksize != 0 || (few_shapes() && number % 3 != 0)) continue;
          const GroupedRows rows = random_grouped_rows(rng, shape, Routing::kAny);
          INFO(number << ", dtype " << dtype << (nested ? ", nested, " : ", ") << shape.n << " x "
                      << shape.k << ", blocks of " << blocksize << ", " << describe(rows));
          const auto experts = random_experts(rng, {dtype, blocksize, nested}, shape);
          check_product(rng, Product<GradientKind>(rng, experts, dtype, rows), stream, counts);
        }
  check_counts<GradientKind>(counts, 1);
}

TEST_CASE("a gradient of experts takes nothing from the next one's codes or scales",
          "[cuda][matmul_grouped]") {
  const Stream stream;
  Counts of_codebooks, of_scales;
  uint64_t number = 0x1ab00000;
  for (const nf4_dtype dtype : kDtypes16)
    for (const bool nested : {false, true})
      for (const int64_t n : {40, 64, 128, 192}) {
        Rng rng(++number);
        const GroupedShape shape{5, n, 256, 60};
        GroupedRows rows = random_grouped_rows(rng, shape, Routing::kAny);
        while (rows.x_rows == 0) rows = random_grouped_rows(rng, shape, Routing::kAny);
        // Of an index out of range a kernel may multiply 0 by what is not finite.
        for (int32_t &index : rows.x_index)
          index = std::clamp(index, 0, static_cast<int32_t>(rows.x_rows - 1));
        INFO(number << ", dtype " << dtype << (nested ? ", nested, " : ", ") << shape.n << " x "
                    << shape.k << ", " << describe(rows));
        const auto experts = experts_beside_not_finite(rng, {dtype, 64, nested}, shape);
        check_product(rng, Product<GradientKind>(rng, experts, dtype, rows), stream, of_codebooks);
        if (nested) continue;
        const auto others = experts_beside_scales_not_finite(rng, dtype, 64, shape);
        check_product(rng, Product<GradientKind>(rng, others, dtype, rows), stream, of_scales);
      }
  // The others are for the formats' own codebooks.
  for (const cuda::GpuFamily *family : runnable_families())
    CHECK(of_codebooks[family][cuda::kMma64x64] > 0);
  check_counts<GradientKind>(of_scales, 1);
}

TEST_CASE("a gradient of experts without rows is 0, a product of integers without columns the bias",
          "[cuda][matmul_grouped]") {
  const Stream stream;
  Counts counts;
  Rng rng(0x1ac00000);
  const auto rows_of = [&](const GroupedShape &shape) {
    return random_grouped_rows(rng, shape, Routing::kAny);
  };
  for (const nf4_dtype dtype : kDtypes16) {
    INFO("dtype " << dtype);
    for (const bool nested : {false, true}) {
      const GroupedShape shape{4, 0, 64, 5};
      const auto experts = random_experts(rng, {dtype, 64, nested}, shape);
      check_product(rng, Product<GradientKind>(rng, experts, dtype, rows_of(shape)), stream,
                    counts);
    }
    for (const nf4_int4_layout layout : kInt4Layouts) {
      const GroupedShape shape{4, 16, 0, 5};
      const auto experts = random_experts(rng, {layout, dtype, true, 0}, shape, -1);
      for (int i = 0; i < 4; ++i)
        check_product(rng, Product<IntegerKind>(rng, experts, dtype, rows_of(shape)), stream,
                      counts);
    }
  }
  for (const cuda::GpuFamily *family : runnable_families())
    CHECK(counts[family][cuda::kMma64x64] == 2 * (2 * 2 + 2 * 3 * 4));
}

TEST_CASE("kernels of experts' gradients and integers wait for what a predecessor writes late",
          "[cuda][matmul_grouped][long]") {
  constexpr GroupedShape kShape{8, 64, 512, 150};
  const Stream stream;
  Rng rng(0x1a800000);
  check_late_inputs(rng, random_experts(rng, {NF4_DTYPE_BF16, 64, true}, kShape), kShape, stream);
  for (const nf4_int4_layout layout : kInt4Layouts) {
    INFO("layout " << layout);
    const Int4Class kind{layout, NF4_DTYPE_FP16, true, 0};
    check_late_inputs(rng, random_experts(rng, kind, kShape, 128), kShape, stream);
  }
}
