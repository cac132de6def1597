// Every CUDA matmul kernel of integer weights that this GPU runs against the product in binary64:
// layouts, groups, zeros, g_idx, permutations, strides, tails and alignments.
#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "cuda/matmul/matmul.hpp"
#include "cuda/matmul/skinny/strip_plan.hpp"
#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/families.hpp"
#include "support/force_matmul.hpp"
#include "support/int4_matmul.hpp"
#include "support/matmul_expected.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

using Case = Int4MatmulCase;

// Per class, order of columns and dtype; compute-sanitizer runs fewer.
int shapes() { return few_shapes() ? 1 : 12; }

// Few rows of x, or tails of the tiles of 16 to 128 rows.
int64_t random_m(Rng &rng) {
  const int64_t most[] = {2, 8, 20, 80, 200};
  return rng.between(1, rng.pick(most));
}

// The mma kernel runs all that it is given.
void check_counts(const MatmulCounts &counts) {
  for (const cuda::GpuFamily *family : runnable_families()) {
    INFO("family " << family->name);
    REQUIRE(counts.count(family) == 1);
    CHECK(counts.at(family)[cuda::kMma64x64] > 0);
  }
}

// The best family's fast kernels of the layout were met, of these configurations.
void check_fast_counts(MatmulCounts &counts, nf4_int4_layout layout, ConfigRange configs) {
  for (int config = configs.first; config < configs.end; ++config) {
    INFO("layout " << layout << ", " << cuda::kMatmulConfigs[config].name);
    if (has_fast_kernel(layout, config)) CHECK(counts[runnable_families()[0]][config] > 0);
  }
}

// Dequantized to the dtype, multiplied exactly, rounded: ||y - expected|| / ||expected||.
double error_of_dense(const Case &test, const nf4_int4_tensor &weight,
                      const ExpectedProduct &expected) {
  std::vector<uint8_t> dense(weight.rows * weight.cols * 2);
  REQUIRE(nf4_int4_dequant_cpu(&weight, dense.data(), test.dtype, 0) == NF4_STATUS_OK);
  RelativeError error;
  for (int64_t i = 0; i < test.m * weight.rows; ++i) {
    const int64_t column = i / weight.rows, row = i % weight.rows;
    double sum = test.bias.empty() ? 0 : read_number(test.dtype, test.bias.data(), row);
    for (int64_t k = 0; k < weight.cols; ++k)
      sum += read_number(test.dtype, dense.data(), row * weight.cols + k) *
             read_number(test.dtype, test.x.data(), column * test.x_stride + k);
    error.add(round_to(test.dtype, sum), expected[i].value);
  }
  return error.value();
}

double error_of(const Case &test, const std::vector<uint8_t> &y, const ExpectedProduct &expected) {
  const int64_t rows = test.weight.shape.rows;
  RelativeError error;
  for (int64_t i = 0; i < test.m * rows; ++i)
    error.add(read_number(test.dtype, y.data(), i / rows * test.y_stride + i % rows),
              expected[i].value);
  return error.value();
}

}  // namespace

TEST_CASE("every kernel multiplies integer weights within the rounding of its factors",
          "[cuda][matmul][int4][random]") {
  constexpr XKind kKinds[] = {XKind::kOrdinary, XKind::kOutliers, XKind::kNotFinite};
  const Stream stream;
  MatmulCounts counts;
  uint64_t number = 0x1b000000;
  for (const ColumnOrder order : kColumnOrders)
    for (const Int4Class &kind : int4_classes(order))
      for (const nf4_dtype dtype : kDtypes16)
        for (int i = 0; i < shapes(); ++i) {
          Rng rng(++number);
          Case test = random_int4_matmul_case(rng, kind, random_int4_shape(rng, kind.layout), dtype,
                                              random_m(rng), rng.pick(kKinds));
          repeat_rows(test, rng, std::min<int64_t>(test.m, 20));
          INFO(describe(test, number));
          check_matmul(test, rng, stream, counts);
        }
  check_counts(counts);
}

// Racecheck, whose time is that of accesses to shared memory, runs these alone: one CTA tile or
// two, whose CTAs fill their pipelines and split K over clusters, and what only the mma kernels
// take.
TEST_CASE("each kernel of integer weights, once", "[cuda][matmul][int4]") {
  const struct {
    ColumnOrder order;
    int64_t m, cols;
    int32_t group_size;
  } sizes[] = {{ColumnOrder::kPlain, 2, 896, 128},     {ColumnOrder::kPlain, 130, 1024, 64},
               {ColumnOrder::kPlain, 2, 2048, 128},  // wide strips
               {ColumnOrder::kPlain, 3, 160, 32},      {ColumnOrder::kPlain, 70, 160, 32},
               {ColumnOrder::kAnyGIdx, 3, 160, 32},    {ColumnOrder::kAnyGIdx, 70, 160, 32},
               {ColumnOrder::kPermutation, 9, 512, -1}};
  const Stream stream;
  cuda::GpuFacts facts{};
  facts.multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  uint64_t number = 0x1b400000;
  for (const nf4_int4_layout layout : kInt4Layouts)
    for (const nf4_dtype dtype : kDtypes16) {
      if (few_shapes() && dtype != kDtypes16[layout % 2]) continue;
      MatmulCounts counts;
      std::set<int> strips;  // by the warps side by side
      for (const auto &[order, m, cols, group_size] : sizes) {
        Rng rng(++number);
        const bool zeros = number % 2 == 0;
        const Int4Class kind{layout, rng.pick(kDtypes16), zeros,
                             layout == NF4_INT4_GPTQ && zeros ? 1 : 0, order};
        const int64_t rows = layout == NF4_INT4_COMPRESSED_TENSORS ? 149 : 160;
        Case test = plain_int4_case(rng, kind, {rows, cols, group_size}, dtype, m);
        repeat_rows(test, rng, 8);
        INFO(describe(test, number));
        check_matmul(test, rng, stream, counts, Judged::kEachAndAll);
        if (m <= 16 && (group_size < 0 || group_size % 64 == 0))
          strips.insert(cuda::plan_strips(layout, rows, cols, facts).warps_n);
      }
      check_counts(counts);
      check_fast_counts(counts, layout, {cuda::kSkinny2, cuda::kFirstStreamK});
      check_fast_counts(counts, layout, {cuda::kFirstMultistage});
      if (layout != NF4_INT4_COMPRESSED_TENSORS) CHECK(strips.size() == 2);
    }
}

// The products that fast kernels take: groups of 64 and more, rows of x that vectors can load. The
// stream-K kernels, the last, are for weights that are large for the GPU.
TEST_CASE("every kernel multiplies integer weights of many groups",
          "[cuda][matmul][int4][random]") {
  const Stream stream;
  std::map<nf4_int4_layout, MatmulCounts> counts;
  uint64_t number = 0x1b800000;
  for (const ColumnOrder order :
       {ColumnOrder::kPlain, ColumnOrder::kGIdx, ColumnOrder::kPermutation})
    for (const Int4Class &kind : int4_classes(order))
      for (const int64_t m : {1, 5, 16, 40, 130, 300}) {
        Rng rng(++number);
        if (few_shapes() && number % 7 != 0) continue;  // each m, each layout
        const int32_t groups[] = {32, 64, 128, 128, 256, -1};
        const int64_t rows =
            kind.layout == NF4_INT4_AWQ ? rng.between(5, 10) * 32 : rng.between(20, 40) * 8;
        const Int4Shape shape{rows, rng.between(1, 4) * 512, rng.pick(groups)};
        Case test = plain_int4_case(rng, kind, shape, rng.pick(kDtypes16), m);
        repeat_rows(test, rng, 8);
        INFO(describe(test, number));
        check_matmul(test, rng, stream, counts[kind.layout], Judged::kEachAndAll);
      }
  for (const nf4_int4_layout layout : kInt4Layouts) {
    check_counts(counts[layout]);
    if (few_shapes()) continue;
    check_fast_counts(counts[layout], layout, {cuda::kSkinny2, cuda::kFirstStreamK});
    check_fast_counts(counts[layout], layout, {cuda::kFirstMultistage});
  }
}

// Each with tiles that several CTAs have a part of, and with tiles that are shared beside such as
// are not.
TEST_CASE("stream-K kernels of integer weights share the tiles that do not fill the GPU",
          "[cuda][matmul][int4]") {
  const int ctas = device_attribute(cudaDevAttrMultiProcessorCount);
  const Stream stream;
  uint64_t number = 0x1ba00000;
  const struct {
    int64_t n_tiles, k_tiles, m_tiles;
  } sizes[] = {{ctas / 3 + 1, 16, 1},
               {2 * ctas + 3, 4, 1},
               {ctas / 2 + 3, 4, 3},
               {ctas / 4 - 1, 18, 1},  // split-K
               {ctas / 16, 35, 2}};
  for (int config = cuda::kFirstStreamK; config < cuda::kMatmulConfigCount; ++config)
    for (const nf4_int4_layout layout : kInt4Layouts)
      for (const auto &[n_tiles, k_tiles, m_tiles] : sizes) {
        if (!has_fast_kernel(layout, config)) continue;
        Rng rng(++number);
        // A size for each layout, another for each.
        if ((few_shapes() || k_tiles > 16) && number % 3 != static_cast<uint64_t>(layout % 3))
          continue;
        const bool zeros = rng.one_in(2), half_tile = rng.one_in(4);
        const Int4Class kind{layout, rng.pick(kDtypes16), zeros,
                             layout == NF4_INT4_GPTQ && zeros ? 1 : 0,
                             rng.one_in(2) ? ColumnOrder::kPlain : ColumnOrder::kPermutation};
        const int64_t odd_rows = layout == NF4_INT4_COMPRESSED_TENSORS ? rng.between(0, 7) : 0;
        const Int4Shape shape{
            n_tiles * cuda::kMatmulConfigs[config].tile_n - rng.between(0, 3) * 32 - odd_rows,
            k_tiles * 128 - (half_tile ? 64 : 0), half_tile || rng.one_in(2) ? 64 : 128};
        Case test = plain_int4_case(rng, kind, shape, rng.pick(kDtypes16),
                                    cuda::kMatmulConfigs[config].tile_m * m_tiles - 3);
        repeat_rows(test, rng, 8);
        INFO(describe(test, number));
        MatmulCounts counts;
        check_matmul(test, rng, stream, counts, Judged::kEachAndAll, {config, config + 1});
        check_fast_counts(counts, layout, {config, config + 1});
      }
}

// The last unit of 8 rows has one, whose scales end where their memory does.
TEST_CASE("skinny kernels multiply compressed-tensors of one row more than whole units",
          "[cuda][matmul][int4]") {
  const Stream stream;
  const int64_t ctas = device_attribute(cudaDevAttrMultiProcessorCount);
  uint64_t number = 0x1bb00000;
  for (const int64_t units : {int64_t{20}, ctas, 2 * ctas + 1})
    for (const bool zeros : {false, true})
      for (const int64_t m : {1, 8}) {
        Rng rng(++number);
        if (few_shapes() && units != 20) continue;
        const Int4Class kind{NF4_INT4_COMPRESSED_TENSORS, rng.pick(kDtypes16), zeros, 0};
        Case test = plain_int4_case(rng, kind, {units * 8 + 1, 4096, 64}, rng.pick(kDtypes16), m);
        INFO(describe(test, number));
        MatmulCounts counts;
        const ConfigRange configs{m == 1 ? cuda::kSkinny2 : cuda::kSkinny8, cuda::kFirstWgmma};
        check_matmul(test, rng, stream, counts, Judged::kEachAndAll, configs);
        check_fast_counts(counts, kind.layout, configs);
      }
}

TEST_CASE("the error is that of a dense product with rounded weights",
          "[cuda][matmul][int4][long]") {
  const Stream stream;
  uint64_t number = 0x1bc00000;
  for (const Int4Class &kind : int4_classes())
    for (const nf4_dtype dtype : kDtypes16)
      for (const int64_t m : {1, 12, 96, 160}) {
        Rng rng(++number);
        Case test = plain_int4_case(rng, kind, {128, 1024, rng.one_in(2) ? 64 : 128}, dtype, m);
        repeat_rows(test, rng, 12);
        INFO(describe(test, number));
        const PlacedInt4Matmul placed(rng, test, true);
        const nf4_int4_tensor host = test.weight.in_place();
        const ExpectedProduct expected(test, host);
        const double dense = error_of_dense(test, host, expected);
        for (int config = 0; config < cuda::kMatmulConfigCount; ++config) {
          INFO(cuda::kMatmulConfigs[config].name);
          const ForcedMatmul forced(runnable_families()[0], config);
          if (placed.used(test) != config) continue;
          REQUIRE(placed.multiply(test, stream) == NF4_STATUS_OK);
          stream.synchronize();
          CHECK(error_of(test, placed.y.read(), expected) <= 1.1 * dense);
        }
      }
}
