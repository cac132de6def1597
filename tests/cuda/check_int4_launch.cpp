// Launches of integer weights: graphs, predecessors, repetition, several in one call, empty ones.
#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "cuda/matmul/matmul.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/device.hpp"
#include "support/int4_cases.hpp"
#include "support/int4_matmul.hpp"
#include "support/launches.hpp"

using namespace nf4;
using namespace nf4::test;

TEST_CASE("integer weights in a graph", "[cuda][int4]") {
  Rng rng(0xf000000);
  const Stream stream;
  HostInt4Weight host = random_int4_weight(
      rng, {NF4_INT4_GPTQ, NF4_DTYPE_FP16, true, 1, ColumnOrder::kGIdx}, {264, 512, 128});
  const HostInt4Weight sorted = sorted_shape(host);
  HostInt4Weight quantized = empty_int4_weight(
      {NF4_INT4_AWQ, NF4_DTYPE_FP16, true, 0, ColumnOrder::kPlain}, {264, 512, 64});
  const DeviceInt4Weight from(rng, host), to(rng, sorted), awq(rng, quantized);
  const DeviceBuffer values(host.elements() * 2), again(host.elements() * 2);
  const auto run = [&] {
    REQUIRE(nf4_int4_reorder_launch(&from.tensor(), &to.tensor(), stream) == NF4_STATUS_OK);
    REQUIRE(nf4_int4_dequant_launch(&to.tensor(), values.data(), NF4_DTYPE_FP16, stream) ==
            NF4_STATUS_OK);
    REQUIRE(nf4_int4_quantize_launch(values.data(), NF4_DTYPE_FP16, &awq.tensor(), 0, stream) ==
            NF4_STATUS_OK);
    REQUIRE(nf4_int4_dequant_launch(&awq.tensor(), again.data(), NF4_DTYPE_FP16, stream) ==
            NF4_STATUS_OK);
  };
  run();
  stream.synchronize();
  const std::vector<uint8_t> expected = again.read();
  cudaGraphExec_t graph = capture(stream, run);
  for (int replay = 0; replay < (few_shapes() ? 3 : 50); ++replay) {
    fill_bytes(values.data(), 0xa5, values.size());
    fill_bytes(again.data(), 0xa5, again.size());
    REQUIRE_CUDA(cudaGraphLaunch(graph, stream));
    stream.synchronize();
    REQUIRE(same_bytes(again.read(), expected));
  }
  REQUIRE_CUDA(cudaGraphExecDestroy(graph));
  const DeviceBuffer direct(host.elements() * 2);
  REQUIRE(nf4_int4_dequant_launch(&from.tensor(), direct.data(), NF4_DTYPE_FP16, stream) ==
          NF4_STATUS_OK);
  stream.synchronize();
  REQUIRE(first_difference(NF4_DTYPE_FP16, direct.read().data(), values.read().data(),
                           host.elements()) == kNoDifference);
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
        const Int4MatmulCase test = plain_int4_case(rng, kind, {800, 2048, 128}, NF4_DTYPE_BF16, m);
        INFO(describe(test, number));
        const PlacedInt4Matmul placed(rng, test, true);
        require_not_mma(placed, test);
        check_replays({bytes_of("y", placed.y)}, stream,
                      [&] { return placed.multiply(test, stream); });
      }
}

TEST_CASE("a matmul of an integer weight waits for what a predecessor writes late",
          "[cuda][matmul][int4][long]") {
  const Stream stream;
  uint64_t number = 0x1c800000;
  for (const nf4_int4_layout layout : kInt4Layouts)
    for (const ColumnOrder order :
         {ColumnOrder::kPlain, ColumnOrder::kBoth, ColumnOrder::kPermutation})
      for (const int64_t m : {1, 8, 16, 40, 130, 300}) {
        Rng rng(++number);
        const Int4Class kind{layout, NF4_DTYPE_BF16, true, 0, order};
        Int4MatmulCase test = plain_int4_case(rng, kind, {320, 1024, 128}, rng.pick(kDtypes16), m);
        test.bias.assign(320 * 2, 0x3c);
        INFO(describe(test, number));
        const PlacedInt4Matmul placed(rng, test, true);
        require_not_mma(placed, test);
        std::vector<DeviceBytes> inputs = parts_of(test.weight, placed.weight.tensor());
        inputs.push_back(bytes_of("x", placed.x));
        inputs.push_back(bytes_of("bias", placed.bias));
        check_waits(inputs, {bytes_of("y", placed.y)}, stream,
                    [&] { return placed.multiply(test, stream); });
      }
}

TEST_CASE("dequantize, quantize and reorder of integer weights wait for what comes late",
          "[cuda][int4]") {
  const Stream stream;
  uint64_t number = 0x1ca00000;
  for (const nf4_int4_layout layout : kInt4Layouts)
    for (const ColumnOrder order :
         {ColumnOrder::kPlain, ColumnOrder::kGIdx, ColumnOrder::kPermutation}) {
      Rng rng(++number);
      HostInt4Weight host =
          random_int4_weight(rng, {layout, NF4_DTYPE_FP16, true, 0, order}, {320, 1024, 128}, true);
      INFO(describe(host, number));
      const DeviceInt4Weight weight(rng, host, true);
      const std::vector<DeviceBytes> parts = parts_of(host, weight.tensor());
      const DeviceBuffer values(host.elements() * 2);
      const DeviceBytes bytes = bytes_of("values", values);
      check_waits(parts, {bytes}, stream, [&] {
        return nf4_int4_dequant_launch(&weight.tensor(), values.data(), NF4_DTYPE_FP16, stream);
      });
      if (order == ColumnOrder::kPlain) {
        const DeviceInt4Weight quantized(rng, host, true);
        check_waits({bytes}, parts_of(host, quantized.tensor()), stream, [&] {
          return nf4_int4_quantize_launch(values.data(), NF4_DTYPE_FP16, &quantized.tensor(), 0,
                                          stream);
        });
      }
      if (order == ColumnOrder::kGIdx) {
        const HostInt4Weight to = sorted_shape(host);
        const DeviceInt4Weight sorted(rng, to, true);
        const std::vector<DeviceBytes> written = parts_of(to, sorted.tensor());
        check_waits({parts[kInt4Packed], parts[kInt4GIdx]},
                    {written[kInt4Packed], written[kInt4Permutation]}, stream, [&] {
                      return nf4_int4_reorder_launch(&weight.tensor(), &sorted.tensor(), stream);
                    });
      }
    }
}

TEST_CASE("a matmul of an integer weight without rows or columns", "[cuda][matmul][int4]") {
  const Stream stream;
  MatmulCounts counts;
  Rng rng(0x1d000000);
  for (const Int4Class &kind : int4_classes()) {
    Int4MatmulCase no_columns =
        random_int4_matmul_case(rng, kind, {40, 0, -1}, NF4_DTYPE_FP16, 3, XKind::kOrdinary);
    INFO(describe(no_columns, 0));
    check_matmul(no_columns, rng, stream, counts);
    for (const Int4Shape &shape : {Int4Shape{0, 64, 32}, Int4Shape{40, 64, 32}}) {
      const Int4MatmulCase nothing = random_int4_matmul_case(
          rng, kind, shape, NF4_DTYPE_BF16, shape.rows == 0 ? 3 : 0, XKind::kOrdinary);
      CHECK(PlacedInt4Matmul(rng, nothing, false).multiply(nothing, stream) == NF4_STATUS_OK);
    }
    Int4MatmulCase in_fp32 =
        random_int4_matmul_case(rng, kind, {40, 64, 32}, NF4_DTYPE_BF16, 3, XKind::kOrdinary);
    const PlacedInt4Matmul placed(rng, in_fp32, false);
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
    std::vector<Int4MatmulCase> cases;
    std::vector<PlacedInt4Matmul> placed;
    const int count = static_cast<int>(rng.between(2, 6));
    for (int j = 0; j < count; ++j) {
      const nf4_int4_layout layout = rng.pick(kInt4Layouts);
      const Int4Class kind{layout, rng.pick(kDtypes16), true, layout == NF4_INT4_GPTQ ? 1 : 0,
                           rng.pick(kColumnOrders)};
      const Int4Shape shape{rng.between(1, 60) * 8, rng.between(1, 10) * 128, 64};
      cases.push_back(plain_int4_case(rng, kind, shape, rng.pick(kDtypes16), rng.between(0, 40)));
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
