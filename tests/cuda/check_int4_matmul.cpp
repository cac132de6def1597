// Every CUDA matmul kernel of integer weights that this GPU runs against the product in binary64:
// layouts, groups, zeros, g_idx, permutations, strides, tails and alignments.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "cuda/matmul/matmul.hpp"
#include "cuda/matmul/wgmma/tile.hpp"
#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/families.hpp"
#include "support/force_matmul.hpp"
#include "support/int4_cases.hpp"
#include "support/kernels.hpp"
#include "support/matmul_cases.hpp"
#include "support/matmul_expected.hpp"
#include "support/matmul_placed.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

using Case = MatmulCaseOf<HostInt4Weight>;
using Placed = PlacedMatmulOf<HostInt4Weight>;

constexpr nf4_dtype kDtypes16[] = {NF4_DTYPE_FP16, NF4_DTYPE_BF16};
// Per class, order of columns and dtype; compute-sanitizer runs fewer.
bool few_shapes() { return std::getenv("NF4_TEST_SHAPES") != nullptr; }
int shapes() { return few_shapes() ? 1 : 12; }

// Few rows of x, or tails of the tiles of 16 to 128 rows.
int64_t random_m(Rng &rng) {
  const int64_t most[] = {2, 8, 20, 80, 200};
  return rng.between(1, rng.pick(most));
}

Case plain_case(Rng &rng, const Int4Class &kind, const Int4Shape &shape, nf4_dtype dtype,
                int64_t m) {
  Case test;
  do test = random_int4_matmul_case(rng, kind, shape, dtype, m, XKind::kOrdinary, true);
  while (test.x_stride % 8 != 0);
  return test;
}

// The mma kernel runs all that it is given.
void check_counts(const MatmulCounts &counts) {
  for (const cuda::GpuFamily *family : runnable_families()) {
    INFO("family " << family->name);
    REQUIRE(counts.count(family) == 1);
    CHECK(counts.at(family)[cuda::kMma64x64] > 0);
  }
}

int device_attribute(cudaDeviceAttr attribute) {
  int value = 0;
  REQUIRE_CUDA(cudaDeviceGetAttribute(&value, attribute, 0));
  return value;
}

// Whether the best family has a skinny or wgmma kernel of the layout in the configuration. Less
// shared memory than Hopper's leaves some of them out.
bool has_fast_kernel(nf4_int4_layout layout, int config) {
  const cuda::GpuFamily &best = *runnable_families()[0];
  if (device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) < cuda::kWgmmaSmemBytes)
    return false;
  if (cuda::is_skinny(config))
    return best.tensor_maps && (layout != NF4_INT4_AWQ || config != cuda::kSkinny2);
  return cuda::has_int4_kernel(config) && cuda::matmul_has(best, config, compute_capability());
}

// The best family's fast kernels of the layout were met, of these configurations.
void check_fast_counts(MatmulCounts &counts, nf4_int4_layout layout, ConfigRange configs) {
  for (int config = configs.first; config < configs.end; ++config) {
    INFO("layout " << layout << ", " << cuda::kMatmulConfigs[config].name);
    if (has_fast_kernel(layout, config)) CHECK(counts[runnable_families()[0]][config] > 0);
  }
}

// What is aligned, in memory, rows and groups, is not kMma64x64's where there are others.
void require_not_mma(const Placed &placed, const Case &test) {
  const int config = test.m <= 16 ? cuda::kSkinny16 : cuda::kFirstWgmma;
  if (!test.weight.has(kInt4GIdx) && has_fast_kernel(test.weight.shape.layout, config))
    REQUIRE(placed.used(test) != cuda::kMma64x64);
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
          "[cuda][matmul][int4]") {
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

// What fast kernels take: groups of 64 and more, rows of x that vectors can load. The stream-K
// kernels, the last, are for weights that are large for the GPU.
TEST_CASE("every kernel multiplies integer weights of many groups", "[cuda][matmul][int4]") {
  const Stream stream;
  std::map<nf4_int4_layout, MatmulCounts> counts;
  uint64_t number = 0x1b800000;
  for (const ColumnOrder order :
       {ColumnOrder::kPlain, ColumnOrder::kGIdx, ColumnOrder::kPermutation})
    for (const Int4Class &kind : int4_classes(order))
      for (const int64_t m : {1, 5, 16, 40, 130, 300}) {
        Rng rng(++number);
        const int32_t groups[] = {32, 64, 128, 128, 256, -1};
        const int64_t rows =
            kind.layout == NF4_INT4_AWQ ? rng.between(5, 10) * 32 : rng.between(20, 40) * 8;
        const Int4Shape shape{rows, rng.between(1, 4) * 512, rng.pick(groups)};
        Case test = plain_case(rng, kind, shape, rng.pick(kDtypes16), m);
        repeat_rows(test, rng, 8);
        INFO(describe(test, number));
        check_matmul(test, rng, stream, counts[kind.layout], Judged::kEachAndAll);
      }
  for (const nf4_int4_layout layout : kInt4Layouts) {
    check_counts(counts[layout]);
    if (!few_shapes())
      check_fast_counts(counts[layout], layout, {cuda::kSkinny2, cuda::kFirstStreamK});
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
  } sizes[] = {{ctas / 3 + 1, 16, 1}, {2 * ctas + 3, 4, 1}, {ctas / 2 + 3, 4, 3}};
  for (int config = cuda::kFirstStreamK; config < cuda::kMatmulConfigCount; ++config)
    for (const nf4_int4_layout layout : kInt4Layouts)
      for (const auto &[n_tiles, k_tiles, m_tiles] : sizes) {
        if (!has_fast_kernel(layout, config)) continue;
        Rng rng(++number);
        if (few_shapes() && number % 4 != 0) continue;  // each layout, each size
        const bool zeros = rng.one_in(2), half_tile = rng.one_in(4);
        const Int4Class kind{layout, rng.pick(kDtypes16), zeros,
                             layout == NF4_INT4_GPTQ && zeros ? 1 : 0,
                             rng.one_in(2) ? ColumnOrder::kPlain : ColumnOrder::kPermutation};
        const int64_t odd_rows = layout == NF4_INT4_COMPRESSED_TENSORS ? rng.between(0, 7) : 0;
        const Int4Shape shape{n_tiles * 128 - rng.between(0, 3) * 32 - odd_rows,
                              k_tiles * 128 - (half_tile ? 64 : 0),
                              half_tile || rng.one_in(2) ? 64 : 128};
        Case test = plain_case(rng, kind, shape, rng.pick(kDtypes16),
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
        Case test = plain_case(rng, kind, {units * 8 + 1, 4096, 64}, rng.pick(kDtypes16), m);
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
        Case test = plain_case(rng, kind, {128, 1024, rng.one_in(2) ? 64 : 128}, dtype, m);
        repeat_rows(test, rng, 12);
        INFO(describe(test, number));
        const Placed placed(rng, test, true);
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

TEST_CASE("a matmul of an integer weight gives the same bits 100 times, and from a graph",
          "[cuda][matmul][int4][long]") {
  const Stream stream;
  uint64_t number = 0x1c000000;
  for (const nf4_int4_layout layout : kInt4Layouts)
    for (const ColumnOrder order :
         {ColumnOrder::kPlain, ColumnOrder::kGIdx, ColumnOrder::kPermutation})
      for (const int64_t m : {1, 7, 16, 70, 300}) {
        Rng rng(++number);
        const Int4Class kind{layout, NF4_DTYPE_FP16, true, 0, order};
        const Case test = plain_case(rng, kind, {800, 2048, 128}, NF4_DTYPE_BF16, m);
        INFO(describe(test, number));
        const Placed placed(rng, test, true);
        require_not_mma(placed, test);
        REQUIRE(placed.multiply(test, stream) == NF4_STATUS_OK);
        stream.synchronize();
        const std::vector<uint8_t> expected = placed.y.read();
        cudaGraphExec_t graph =
            capture(stream, [&] { REQUIRE(placed.multiply(test, stream) == NF4_STATUS_OK); });
        for (int replay = 0; replay < 100; ++replay) {
          fill_bytes(placed.y.data(), 0xa5, placed.y.size());
          REQUIRE_CUDA(cudaGraphLaunch(graph, stream));
          stream.synchronize();
          REQUIRE(same_bytes(placed.y.read(), expected));
        }
        REQUIRE_CUDA(cudaGraphExecDestroy(graph));
      }
}

// Launches may start while their predecessor runs, which this one invites them to.
TEST_CASE("a matmul of an integer weight waits for what a predecessor writes late",
          "[cuda][matmul][int4][long]") {
  const Stream stream;
  constexpr long long kEnoughToStart = 2'000'000;
  const char *const kNames[] = {"packed", "scales", "zeros", "g_idx", "permutation"};
  uint64_t number = 0x1c800000;
  for (const nf4_int4_layout layout : kInt4Layouts)
    for (const ColumnOrder order :
         {ColumnOrder::kPlain, ColumnOrder::kBoth, ColumnOrder::kPermutation})
      for (const int64_t m : {1, 8, 16, 40, 130, 300}) {
        Rng rng(++number);
        const Int4Class kind{layout, NF4_DTYPE_BF16, true, 0, order};
        Case test = plain_case(rng, kind, {320, 1024, 128}, rng.pick(kDtypes16), m);
        test.bias.assign(320 * 2, 0x3c);
        INFO(describe(test, number));
        const Placed placed(rng, test, true);
        require_not_mma(placed, test);
        REQUIRE(placed.multiply(test, stream) == NF4_STATUS_OK);
        stream.synchronize();
        const std::vector<uint8_t> expected = placed.y.read();
        const nf4_int4_tensor &weight = placed.weight.tensor();
        struct Buffer {
          const char *name;
          const void *address;
          size_t bytes;
        };
        std::vector<Buffer> buffers = {{"x", placed.x.data(), placed.x.size()},
                                       {"bias", placed.bias.data(), placed.bias.size()}};
        const void *const parts[] = {weight.packed, weight.scales, weight.zeros, weight.g_idx,
                                     weight.permutation};
        for (int part = 0; part < kInt4PartCount; ++part)
          if (test.weight.has(part))
            buffers.push_back({kNames[part], parts[part], test.weight.bytes[part].size()});
        for (const Buffer &buffer : buffers) {
          INFO(buffer.name);
          auto *const address = static_cast<uint8_t *>(const_cast<void *>(buffer.address));
          const DeviceBuffer source(buffer.bytes);
          REQUIRE_CUDA(cudaMemcpy(source.data(), address, buffer.bytes, cudaMemcpyDeviceToDevice));
          fill_bytes(address, 0, buffer.bytes);
          fill_bytes(placed.y.data(), 0xa5, placed.y.size());
          REQUIRE_CUDA(cudaDeviceSynchronize());
          launch_late_copy(address, source.data<uint8_t>(), buffer.bytes, kEnoughToStart, stream);
          REQUIRE(placed.multiply(test, stream) == NF4_STATUS_OK);
          stream.synchronize();
          CHECK(same_bytes(placed.y.read(), expected));
        }
      }
}

TEST_CASE("a matmul of an integer weight without rows or columns", "[cuda][matmul][int4]") {
  const Stream stream;
  MatmulCounts counts;
  Rng rng(0x1d000000);
  for (const Int4Class &kind : int4_classes()) {
    Case no_columns =
        random_int4_matmul_case(rng, kind, {40, 0, -1}, NF4_DTYPE_FP16, 3, XKind::kOrdinary);
    INFO(describe(no_columns, 0));
    check_matmul(no_columns, rng, stream, counts);
    for (const Int4Shape &shape : {Int4Shape{0, 64, 32}, Int4Shape{40, 64, 32}}) {
      const Case nothing = random_int4_matmul_case(rng, kind, shape, NF4_DTYPE_BF16,
                                                   shape.rows == 0 ? 3 : 0, XKind::kOrdinary);
      CHECK(Placed(rng, nothing, false).multiply(nothing, stream) == NF4_STATUS_OK);
    }
    Case in_fp32 =
        random_int4_matmul_case(rng, kind, {40, 64, 32}, NF4_DTYPE_BF16, 3, XKind::kOrdinary);
    const Placed placed(rng, in_fp32, false);
    in_fp32.dtype = NF4_DTYPE_FP32;
    CHECK(placed.multiply(in_fp32, stream) == NF4_STATUS_INVALID_ARGUMENT);
    stream.synchronize();
    CHECK(placed.y.untouched());
  }
}

// They use the workspace in turn.
TEST_CASE("products of integer weights in one call have the bits of one call each",
          "[cuda][matmul][int4]") {
  const Stream stream;
  for (int i = 0; i < (few_shapes() ? 2 : 20); ++i) {
    Rng rng(0x1d800000 + i);
    std::vector<Case> cases;
    std::vector<Placed> placed;
    const int count = static_cast<int>(rng.between(2, 6));
    for (int j = 0; j < count; ++j) {
      const nf4_int4_layout layout = rng.pick(kInt4Layouts);
      const Int4Class kind{layout, rng.pick(kDtypes16), true, layout == NF4_INT4_GPTQ ? 1 : 0,
                           rng.pick(kColumnOrders)};
      const Int4Shape shape{rng.between(1, 60) * 8, rng.between(1, 10) * 128, 64};
      cases.push_back(plain_case(rng, kind, shape, rng.pick(kDtypes16), rng.between(0, 40)));
      placed.emplace_back(rng, cases.back(), true);
    }
    std::vector<const nf4_int4_tensor *> weights;
    std::vector<nf4_matmul_args> args;
    std::vector<std::vector<uint8_t>> alone;
    for (int j = 0; j < count; ++j) {
      weights.push_back(&placed[j].weight.tensor());
      args.push_back(placed[j].args(cases[j]));
      REQUIRE(placed[j].multiply(cases[j], stream) == NF4_STATUS_OK);
      stream.synchronize();
      alone.push_back(placed[j].y.read());
      if (placed[j].y.size() != 0) fill_bytes(placed[j].y.data(), 0xa5, placed[j].y.size());
    }
    size_t bytes = 0;
    REQUIRE(nf4_int4_matmul_batch_workspace_size(weights.data(), args.data(), count, &bytes) ==
            NF4_STATUS_OK);
    const DeviceBuffer workspace(bytes);
    REQUIRE(nf4_int4_matmul_batch_launch(weights.data(), args.data(), count, workspace.data(),
                                         bytes, stream) == NF4_STATUS_OK);
    stream.synchronize();
    for (int j = 0; j < count; ++j) CHECK(same_bytes(placed[j].y.read(), alone[j]));

    std::vector<int32_t> launches(count);
    std::vector<const char *> kernels(count);
    REQUIRE(nf4_int4_matmul_plan(weights.data(), args.data(), count, 0, launches.data(),
                                 kernels.data()) == NF4_STATUS_OK);
    for (int j = 0; j < count; ++j) {
      const std::string used =
          cuda::kMatmulConfigs[cases[j].m == 0 ? 0 : placed[j].used(cases[j])].name;
      CHECK((kernels[j] == nullptr ? "" : kernels[j]) == (cases[j].m == 0 ? "" : used));
    }
  }
}
