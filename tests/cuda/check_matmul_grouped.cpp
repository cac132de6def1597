// Every CUDA kernel of grouped products that this GPU runs against the products in binary64, on
// random routings, shapes, strides and tables.
#include <cuda_runtime.h>

#include <array>
#include <cmath>
#include <map>
#include <vector>

#include "cuda/matmul_grouped/matmul_grouped.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/families.hpp"
#include "support/forced_grouped.hpp"
#include "support/grouped_cases.hpp"
#include "support/launches.hpp"
#include "support/matmul_placed.hpp"
#include "validate.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

// In a GPU's memory. aligned: on 256-byte boundaries, else now and then.
struct PlacedGrouped {
  DeviceWeight weight;
  DeviceBuffer x, bias, y, ends, x_index, row_scale, workspace;

  PlacedGrouped(Rng &rng, const GroupedCase &test, bool aligned)
      : weight(rng, test.all.weight, aligned),
        x(test.all.x.size(), aligned ? 0 : random_lead(rng, dtype_bytes(test.all.dtype))),
        bias(test.bias.size(), 64),
        y(test.y_bytes(), aligned ? 256 : random_lead(rng, dtype_bytes(test.all.dtype))),
        ends(test.ends.size() * 4, 64),
        x_index(test.x_index.size() * 4, 64),
        row_scale(test.row_scale.size() * 4, 64),
        workspace(workspace_bytes(test), 64) {
    x.write(test.all.x.data());
    bias.write(test.bias.data());
    ends.write(test.ends.data());
    x_index.write(test.x_index.data());
    row_scale.write(test.row_scale.data());
  }

  size_t workspace_bytes(const GroupedCase &test) const {
    size_t bytes = 0;
    const nf4_grouped_args given = args(test);
    REQUIRE(nf4_matmul_grouped_workspace_size(&weight.tensor(), &given, &bytes) == NF4_STATUS_OK);
    return bytes;
  }
  nf4_grouped_args args(const GroupedCase &test) const {
    return grouped_args(
        test, {x.data(), bias.data(), ends.data(), x_index.data(), row_scale.data(), y.data()});
  }
  int used(const GroupedCase &test) const {
    const nf4_grouped_args given = args(test);
    GroupedProblem problem{};
    REQUIRE(validate_grouped_shape(&weight.tensor(), &given, problem) == NF4_STATUS_OK);
    REQUIRE(validate_grouped_operands(&weight.tensor(), &given, nullptr, 0, problem) ==
            NF4_STATUS_OK);
    int config;
    REQUIRE(cuda::matmul_grouped_config(problem, nullptr, config) == NF4_STATUS_OK);
    return config;
  }
  nf4_status multiply(const GroupedCase &test, cudaStream_t stream) const {
    const nf4_grouped_args given = args(test);
    return nf4_matmul_grouped_launch(&weight.tensor(), &given, workspace.data(), workspace.size(),
                                     stream);
  }
  bool leads_intact() const {
    return y.lead_intact() && workspace.lead_intact() && ends.lead_intact() && x.lead_intact() &&
           weight.leads_intact();
  }
};

// The expected y[row][n], where a row has an expert.
std::vector<Expected> expected_y(GroupedCase &test) {
  std::array<void *, kPartCount> addresses{};
  for (int part = 0; part < kPartCount; ++part)
    if (test.all.weight.has(Part(part))) addresses[part] = test.all.weight.bytes[part].data();
  const nf4_tensor weight = test.all.weight.at(addresses);
  std::vector<Expected> y(test.shape.m * test.shape.n);
  for (int64_t i = 0; i < static_cast<int64_t>(y.size()); ++i)
    if (test.expert_of(i / test.shape.n) >= 0)
      y[i] = expect(test, weight, i / test.shape.n, i % test.shape.n);
  return y;
}

// Each element, what lies between rows, and with `plain` numbers the whole on average.
void check_y(const GroupedCase &test, const std::vector<Expected> &expected,
             const std::vector<uint8_t> &y, bool plain) {
  const nf4_dtype dtype = test.all.dtype;
  const int64_t n = test.shape.n;
  double squares = 0, energy = 0;
  int64_t wrong = -1;
  for (int64_t i = 0; i < test.shape.m * n; ++i) {
    if (test.expert_of(i / n) < 0) continue;
    const double got = read_number(dtype, y.data(), i / n * test.y_stride + i % n);
    // A row of zeros times weights that are not finite.
    if (!plain && test.x_row_of(i / n) < 0 && !std::isfinite(got)) continue;
    if (wrong < 0 && !is_right(test.all, expected[i], got)) wrong = i;
    squares += (got - expected[i].value) * (got - expected[i].value);
    energy += expected[i].energy + expected[i].value * expected[i].value;
  }
  if (wrong >= 0)
    FAIL("y[" << wrong / n << "][" << wrong % n << "], expected " << expected[wrong].value
              << ", of the magnitude " << expected[wrong].magnitude);
  const double most = dtype == NF4_DTYPE_BF16 ? 4e-3 : 5e-4;
  if (plain) REQUIRE(squares <= most * most * energy);
  const int64_t bytes = dtype_bytes(dtype);
  for (int64_t i = 0; i < static_cast<int64_t>(y.size()); ++i)
    if (i / bytes % test.y_stride >= n && y[i] != 0xa5) FAIL("between rows of y, byte " << i);
}

using Counts = std::map<const cuda::GpuFamily *, std::array<int, cuda::kMatmulConfigCount>>;

// Every kernel of every family that takes the case, aligned and as it comes.
void check_grouped(GroupedCase &test, Rng &rng, const Stream &stream, Counts &counts, bool plain) {
  const std::vector<Expected> expected = expected_y(test);
  for (const bool aligned : {true, false}) {
    const PlacedGrouped placed(rng, test, aligned);
    for (const cuda::GpuFamily *family : runnable_families())
      for (int config = 0; config < cuda::kMatmulConfigCount; ++config) {
        INFO("family " << family->name << ", " << cuda::kMatmulConfigs[config].name);
        const ForcedGrouped forced(family, config);
        if (placed.used(test) != config) continue;
        ++counts[family][config];
        if (placed.y.size() != 0) fill_bytes(placed.y.data(), 0xa5, placed.y.size());
        REQUIRE(placed.multiply(test, stream) == NF4_STATUS_OK);
        stream.synchronize();
        check_y(test, expected, placed.y.read(), plain);
        REQUIRE(placed.leads_intact());
      }
  }
}

void check_counts(const Counts &counts, int least) {
  for (const cuda::GpuFamily *family : runnable_families())
    for (int config = 0; config < cuda::kMatmulConfigCount; ++config) {
      INFO("family " << family->name << ", " << cuda::kMatmulConfigs[config].name);
      if (cuda::matmul_grouped_has<Weight>(*family, config, compute_capability()))
        CHECK((counts.count(family) != 0 ? counts.at(family)[config] : 0) >= least);
    }
}

// Several tiles along each side, tiles that are nearly empty, tails, CTAs that have several tiles,
// and warps that have several K-tiles.
constexpr GroupedShape kShapes[] = {
    {1, 40, 256, 3},    {3, 16, 128, 40},  {8, 24, 64, 70},   {5, 100, 768, 21}, {40, 8, 320, 30},
    {130, 4, 64, 200},  {2, 72, 256, 170}, {7, 24, 1024, 16}, {2, 320, 64, 20},  {3, 24, 4608, 20},
    {60, 600, 64, 300}, {2, 40, 128, 700}, {40, 320, 768, 40}};

// A plain case of kAny with rows of x, x_index and row_scale.
GroupedCase indexed_case(Rng &rng, const GroupedShape &shape) {
  GroupedCase test;
  do test = random_grouped_case(rng, {NF4_DTYPE_FP16, 64, true}, shape, Routing::kAny, true);
  while (test.x_index.empty() || test.row_scale.empty() || test.all.m == 0);
  return test;
}

}  // namespace

TEST_CASE("every kernel multiplies each expert's rows of MXFP4 and NVFP4",
          "[cuda][matmul_grouped][e2m1]") {
  const Stream stream;
  Counts counts;
  uint64_t number = 0x19800000;
  for (const nf4_dtype dtype : kDtypes16)
    for (const CaseClass &kind : byte_classes(dtype))
      for (const GroupedShape &shape : kShapes)
        for (const Routing routing : kRoutings) {
          Rng rng(++number);
          if (number % (few_shapes() ? 17 : 3) != 0) continue;
          GroupedCase test = random_grouped_case(rng, kind, shape, routing, true);
          INFO(describe(test, number));
          check_grouped(test, rng, stream, counts, true);
        }
}

TEST_CASE("every kernel multiplies each expert's rows", "[cuda][matmul_grouped]") {
  const Stream stream;
  Counts counts;
  uint64_t number = 0x19000000;
  for (const nf4_dtype dtype : kDtypes16)
    for (const bool nested : {false, true})
      for (const GroupedShape &shape : kShapes)
        for (const Routing routing : kRoutings) {
          Rng rng(++number);
          if (few_shapes() && number % 9 != 0) continue;
          const bool whole = shape.n * shape.k % 256 == 0 && rng.one_in(3);
          GroupedCase test =
              random_grouped_case(rng, {dtype, whole ? 256 : 64, nested}, shape, routing, true);
          INFO(describe(test, number));
          check_grouped(test, rng, stream, counts, true);
        }
  check_counts(counts, few_shapes() ? 1 : 10);
}

TEST_CASE("grouped kernels on anything", "[cuda][matmul_grouped][random]") {
  const Stream stream;
  Counts counts;
  uint64_t number = 0x19400000;
  for (const nf4_dtype dtype : kDtypes16)
    for (const int blocksize : kBlocksizes)
      for (int i = 0; i < shapes_or(20); ++i) {
        Rng rng(++number);
        GroupedCase test =
            random_grouped_case(rng, {dtype, blocksize, rng.one_in(2)},
                                random_grouped_shape(rng, blocksize), rng.pick(kRoutings), false);
        INFO(describe(test, number));
        check_grouped(test, rng, stream, counts, false);
      }
}

TEST_CASE("a graph of a grouped product follows other routings", "[cuda][matmul_grouped]") {
  constexpr int32_t kExperts = 16;
  constexpr int64_t kM = 100;  // enough for kernels whose x is gathered first
  const Stream stream;
  for (int config = 0; config < cuda::kMatmulConfigCount; ++config) {
    if (!cuda::matmul_grouped_has<Weight>(*runnable_families()[0], config, compute_capability()))
      continue;
    INFO(cuda::kMatmulConfigs[config].name);
    const ForcedGrouped forced(runnable_families()[0], config);
    Rng rng(0x19800000 + config);
    GroupedCase test = indexed_case(rng, {kExperts, 48, 512, kM});
    PlacedGrouped placed(rng, test, true);
    REQUIRE(placed.used(test) == config);
    REQUIRE(placed.multiply(test, stream) == NF4_STATUS_OK);
    stream.synchronize();  // it reads the routing that is replaced below
    cudaGraphExec_t graph =
        capture(stream, [&] { REQUIRE(placed.multiply(test, stream) == NF4_STATUS_OK); });
    for (const int32_t apart : {1, 3, 16}) {
      for (int32_t expert = 0; expert < kExperts; ++expert)
        test.ends[expert] = static_cast<int32_t>((expert + 1) / apart * apart * kM / kExperts);
      for (int64_t row = 0; row < kM; ++row) {
        test.x_index[row] = static_cast<int32_t>(row * apart % test.all.m);
        test.row_scale[row] = rng.normal();
      }
      placed.ends.write(test.ends.data());
      placed.x_index.write(test.x_index.data());
      placed.row_scale.write(test.row_scale.data());
      std::vector<uint8_t> first;
      for (int replay = 0; replay < std::min(replays(), 10); ++replay) {
        fill_bytes(placed.y.data(), 0xa5, placed.y.size());
        REQUIRE_CUDA(cudaGraphLaunch(graph, stream));
        stream.synchronize();
        if (replay == 0) first = placed.y.read();
        REQUIRE(same_bytes(placed.y.read(), first));
      }
      check_y(test, expected_y(test), first, true);
    }
    REQUIRE_CUDA(cudaGraphExecDestroy(graph));
  }
}

TEST_CASE("every grouped kernel waits for what a predecessor writes late",
          "[cuda][matmul_grouped][long]") {
  const Stream stream;
  for (int config = 0; config < cuda::kMatmulConfigCount; ++config) {
    if (!cuda::matmul_grouped_has<Weight>(*runnable_families()[0], config, compute_capability()))
      continue;
    INFO(cuda::kMatmulConfigs[config].name);
    const ForcedGrouped forced(runnable_families()[0], config);
    Rng rng(0x19e00000 + config);
    const GroupedCase test = indexed_case(rng, {8, 64, 512, 150});
    const PlacedGrouped placed(rng, test, true);
    REQUIRE(placed.used(test) == config);
    const nf4_tensor &weight = placed.weight.tensor();
    const auto &bytes = test.all.weight.bytes;
    const std::vector<DeviceBytes> inputs = {
        {"packed", weight.packed, bytes[kPacked].size()},
        {"absmax", weight.absmax, bytes[kAbsmax].size()},
        {"nested_absmax", weight.nested_absmax, bytes[kNestedAbsmax].size()},
        {"nested_code", weight.nested_code, bytes[kNestedCode].size()},
        {"x", placed.x.data(), placed.x.size()},
        {"ends", placed.ends.data(), placed.ends.size()},
        {"x_index", placed.x_index.data(), placed.x_index.size()},
        {"row_scale", placed.row_scale.data(), placed.row_scale.size()}};
    check_waits(inputs, {{"y", placed.y.data(), placed.y.size()}}, stream,
                [&] { return placed.multiply(test, stream); });
  }
}
