// Every CUDA kernel of grouped products that this GPU runs against the products in binary64, on
// random routings, shapes, strides and tables.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <vector>

#include "cuda/matmul_grouped/matmul_grouped.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/families.hpp"
#include "support/launches.hpp"
#include "support/matmul_cases.hpp"
#include "support/matmul_expected.hpp"
#include "validate.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

class ForcedGrouped {
 public:
  ForcedGrouped(const cuda::GpuFamily *family, int config) {
    cuda::force_family(family);
    cuda::force_matmul_grouped(config);
  }
  ~ForcedGrouped() {
    cuda::force_matmul_grouped(std::nullopt);
    cuda::force_family(nullptr);
  }
  ForcedGrouped(const ForcedGrouped &) = delete;
  ForcedGrouped &operator=(const ForcedGrouped &) = delete;
};

// The stack of experts with its x and bias, as one product; and which rows of y are whose.
struct GroupedCase {
  MatmulCase stack;
  int experts;
  int64_t m;
  int64_t y_stride;
  std::vector<int32_t> ends;
  std::vector<int32_t> x_index;  // empty: none
  std::vector<float> row_scale;  // empty: none

  int64_t expert_rows() const { return stack.weight.shape.rows / experts; }
  size_t y_bytes() const { return m * y_stride * dtype_bytes(stack.dtype); }
};

struct GroupedShape {
  int experts;
  int64_t expert_rows, cols, m;
};

enum class Routing { kRandom, kOneExpert, kFewExperts, kBad };

std::vector<int32_t> random_ends(Rng &rng, int experts, int64_t m, Routing routing) {
  std::vector<int32_t> ends(experts, 0);
  const int64_t only = rng.below(experts);
  for (int64_t i = 0; i < m; ++i) {
    int64_t expert = rng.below(experts);
    if (routing == Routing::kOneExpert) expert = only;
    if (routing == Routing::kFewExperts) expert = std::min(expert, rng.below(3));
    ++ends[expert];
  }
  for (int expert = 1; expert < experts; ++expert) ends[expert] += ends[expert - 1];
  if (routing == Routing::kBad)
    for (int i = 0; i < 3; ++i) {
      const int32_t values[] = {-7, INT32_MIN, INT32_MAX, static_cast<int32_t>(m) + 3, 0};
      ends[rng.below(experts)] = rng.pick(values);
    }
  return ends;
}

GroupedCase random_grouped_case(Rng &rng, const CaseClass &kind, const GroupedShape &shape,
                                Routing routing) {
  GroupedCase test{};
  const bool gathered = rng.one_in(2);
  const int64_t x_rows = gathered ? rng.between(1, 12) : shape.m;
  test.stack =
      plain_matmul_case(rng, kind, {shape.experts * shape.expert_rows, shape.cols, x_rows});
  repeat_rows(test.stack, rng, std::min<int64_t>(x_rows, 12));
  test.experts = shape.experts;
  test.m = shape.m;
  test.y_stride = shape.expert_rows + (rng.one_in(2) ? 0 : rng.below(20));
  test.ends = random_ends(rng, shape.experts, shape.m, routing);
  for (int64_t i = 0; gathered && i < shape.m; ++i) {
    const int32_t values[] = {-1, static_cast<int32_t>(x_rows), INT32_MAX, INT32_MIN};
    test.x_index.push_back(routing == Routing::kBad && rng.one_in(4)
                               ? rng.pick(values)
                               : static_cast<int32_t>(rng.below(x_rows)));
  }
  if (rng.one_in(2))
    for (int64_t i = 0; i < shape.m; ++i) test.row_scale.push_back(rng.normal());
  return test;
}

template <class T>
void write_vector(const DeviceBuffer &buffer, const std::vector<T> &values) {
  if (!values.empty())
    REQUIRE_CUDA(cudaMemcpy(buffer.data(), values.data(), values.size() * sizeof(T),
                            cudaMemcpyHostToDevice));
}

// In a GPU's memory. aligned: on 256-byte boundaries, else now and then.
struct PlacedGrouped {
  DeviceWeight weight;
  DeviceBuffer x, bias, y, ends, x_index, row_scale;

  PlacedGrouped(Rng &rng, const GroupedCase &test, bool aligned)
      : weight(rng, test.stack.weight, aligned),
        x(test.stack.x.size(), aligned ? 0 : random_lead(rng, dtype_bytes(test.stack.dtype))),
        bias(test.stack.bias.size(), 64),
        y(test.y_bytes(), aligned ? 256 : random_lead(rng, dtype_bytes(test.stack.dtype))),
        ends(test.ends.size() * 4, 64),
        x_index(test.x_index.size() * 4, 64),
        row_scale(test.row_scale.size() * 4, 64) {
    x.write(test.stack.x.data());
    bias.write(test.stack.bias.data());
    write_vector(ends, test.ends);
    write_vector(x_index, test.x_index);
    write_vector(row_scale, test.row_scale);
  }

  nf4_grouped_args args(const GroupedCase &test) const {
    nf4_grouped_args args{};
    args.struct_size = sizeof args;
    args.dtype = test.stack.dtype;
    args.experts = test.experts;
    args.m = test.m;
    args.x = x.data();
    args.x_stride = test.stack.x_stride;
    args.x_rows = test.stack.m;
    args.y = y.data();
    args.y_stride = test.y_stride;
    args.ends = ends.data<int32_t>();
    args.x_index = test.x_index.empty() ? nullptr : x_index.data<int32_t>();
    args.bias = test.stack.bias.empty() ? nullptr : bias.data();
    args.bias_stride = test.expert_rows();
    args.row_scale = test.row_scale.empty() ? nullptr : row_scale.data<float>();
    return args;
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
    return nf4_matmul_grouped_launch(&weight.tensor(), &given, nullptr, 0, stream);
  }
  bool leads_intact() const {
    return y.lead_intact() && ends.lead_intact() && x.lead_intact() && weight.leads_intact();
  }
};

// The products of all rows of x with all experts.
ExpectedProduct expected_products(GroupedCase &test) {
  std::array<void *, kPartCount> addresses{};
  for (int part = 0; part < kPartCount; ++part)
    if (test.stack.weight.has(Part(part))) addresses[part] = test.stack.weight.bytes[part].data();
  return ExpectedProduct(test.stack, test.stack.weight.at(addresses));
}

// Where y differs from what it should be, in rows that belong to an expert: each element, and all
// of them on average. Weights are rounded to 16 bits before they are multiplied, y after.
void check_y(const GroupedCase &test, const ExpectedProduct &products,
             const std::vector<uint8_t> &y) {
  const nf4_dtype dtype = test.stack.dtype;
  const double unit = dtype == NF4_DTYPE_BF16 ? 0x1p-8 : 0x1p-11;
  const int64_t rows = test.expert_rows(), stack_rows = rows * test.experts;
  double squares = 0, energy = 0;
  int64_t end = 0, wrong = -1;
  for (int expert = 0; expert < test.experts; ++expert)
    for (int64_t first = end, i = first;
         i < (end = std::max(first, std::min<int64_t>(test.m, test.ends[expert]))); ++i) {
      const int64_t x_row = test.x_index.empty() ? i : test.x_index[i];
      const bool has_x = x_row >= 0 && x_row < test.stack.m;
      const double scale = test.row_scale.empty() ? 1 : test.row_scale[i];
      for (int64_t n = 0; n < rows; ++n) {
        const int64_t row = expert * rows + n;
        Expected expected;
        if (has_x)
          expected = products[x_row * stack_rows + row];
        else if (!test.stack.bias.empty())
          expected.value = expected.magnitude = read_number(dtype, test.stack.bias.data(), row);
        const double error =
            read_number(dtype, y.data(), i * test.y_stride + n) - scale * expected.value;
        const double most =
            2 * unit * std::abs(scale) * std::abs(expected.magnitude) + (unit < 1e-3 ? 1e-7 : 0);
        if (!(std::abs(error) <= most) && wrong < 0) wrong = i * rows + n;
        squares += error * error;
        energy += scale * scale * (expected.energy + expected.value * expected.value);
      }
    }
  INFO("y[" << wrong / rows << "][" << wrong % rows << "]");
  REQUIRE(wrong == -1);
  REQUIRE(squares <= unit * unit * energy);
  const int64_t bytes = dtype_bytes(dtype);
  for (int64_t i = 0; i < static_cast<int64_t>(y.size()); ++i)
    if (i / bytes % test.y_stride >= rows && y[i] != 0xa5) FAIL("between rows of y, byte " << i);
}

using Counts = std::map<const cuda::GpuFamily *, std::array<int, cuda::kMatmulConfigCount>>;

// Every kernel of every family that takes the case, aligned and as it comes.
void check_grouped(GroupedCase &test, Rng &rng, const Stream &stream, Counts &counts) {
  const ExpectedProduct products = expected_products(test);
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
        check_y(test, products, placed.y.read());
        REQUIRE(placed.leads_intact());
      }
  }
}

void check_counts(const Counts &counts, int least) {
  for (const cuda::GpuFamily *family : runnable_families())
    for (int config = 0; config < cuda::kMatmulConfigCount; ++config) {
      INFO("family " << family->name << ", " << cuda::kMatmulConfigs[config].name);
      if (cuda::matmul_grouped_has(*family, config, compute_capability()))
        CHECK((counts.count(family) != 0 ? counts.at(family)[config] : 0) >= least);
    }
}

std::string describe(const GroupedCase &test, uint64_t number) {
  return std::to_string(test.experts) + " experts, m " + std::to_string(test.m) +
         (test.x_index.empty() ? "" : ", gathered") + (test.row_scale.empty() ? "" : ", scaled") +
         ", " + describe(test.stack, number);
}

constexpr GroupedShape kShapes[] = {{1, 40, 256, 3},    {3, 16, 128, 40},  {8, 17, 64, 70},
                                    {5, 100, 768, 21},  {40, 8, 320, 30},  {130, 4, 64, 200},
                                    {2, 64, 1024, 150}, {7, 24, 2048, 16}, {4, 33, 192, 9}};

}  // namespace

TEST_CASE("every kernel multiplies each expert's rows", "[cuda][matmul_grouped][random]") {
  const Stream stream;
  Counts counts;
  uint64_t number = 0x19000000;
  for (const nf4_dtype dtype : kDtypes16)
    for (const bool nested : {false, true})
      for (const GroupedShape &shape : kShapes)
        for (const Routing routing :
             {Routing::kRandom, Routing::kOneExpert, Routing::kFewExperts, Routing::kBad}) {
          Rng rng(++number);
          if (few_shapes() && number % 9 != 0) continue;
          const CaseClass kind{dtype, shape.expert_rows * shape.cols % 256 == 0 ? 256 : 64, nested};
          const int blocksize = rng.one_in(2) ? 64 : kind.blocksize;
          GroupedCase test;
          if (shape.expert_rows * shape.cols % blocksize != 0) continue;
          test = random_grouped_case(rng, {dtype, blocksize, nested}, shape, routing);
          INFO(describe(test, number));
          check_grouped(test, rng, stream, counts);
        }
  check_counts(counts, few_shapes() ? 1 : 10);
}

TEST_CASE("a graph of a grouped product follows other routings", "[cuda][matmul_grouped]") {
  const Stream stream;
  for (int config = 0; config < cuda::kMatmulConfigCount; ++config) {
    const ForcedGrouped forced(runnable_families()[0], config);
    Rng rng(0x19800000 + config);
    GroupedCase test =
        random_grouped_case(rng, {NF4_DTYPE_BF16, 64, true}, {16, 48, 512, 60}, Routing::kRandom);
    const ExpectedProduct products = expected_products(test);
    const PlacedGrouped placed(rng, test, true);
    if (placed.used(test) != config) continue;
    REQUIRE(placed.multiply(test, stream) == NF4_STATUS_OK);
    cudaGraphExec_t graph =
        capture(stream, [&] { REQUIRE(placed.multiply(test, stream) == NF4_STATUS_OK); });
    for (const Routing routing : {Routing::kOneExpert, Routing::kFewExperts, Routing::kRandom}) {
      test.ends = random_ends(rng, test.experts, test.m, routing);
      write_vector(placed.ends, test.ends);
      std::vector<uint8_t> first;
      for (int replay = 0; replay < 10; ++replay) {
        fill_bytes(placed.y.data(), 0xa5, placed.y.size());
        REQUIRE_CUDA(cudaGraphLaunch(graph, stream));
        stream.synchronize();
        if (replay == 0) first = placed.y.read();
        REQUIRE(same_bytes(placed.y.read(), first));
      }
      INFO(cuda::kMatmulConfigs[config].name);
      check_y(test, products, first);
    }
    REQUIRE_CUDA(cudaGraphExecDestroy(graph));
  }
}

TEST_CASE("a grouped product waits for what a predecessor writes late",
          "[cuda][matmul_grouped][long]") {
  const Stream stream;
  for (const int64_t m : {4, 40, 150, 1200}) {
    Rng rng(0x19e00000 + m);
    GroupedCase test;
    do
      test =
          random_grouped_case(rng, {NF4_DTYPE_BF16, 64, true}, {8, 256, 512, m}, Routing::kRandom);
    while (test.x_index.empty() || test.row_scale.empty());
    const PlacedGrouped placed(rng, test, true);
    const nf4_tensor &weight = placed.weight.tensor();
    const auto &bytes = test.stack.weight.bytes;
    const std::vector<DeviceBytes> inputs = {
        {"packed", weight.packed, bytes[kPacked].size()},
        {"absmax", weight.absmax, bytes[kAbsmax].size()},
        {"nested_absmax", weight.nested_absmax, bytes[kNestedAbsmax].size()},
        {"nested_code", weight.nested_code, bytes[kNestedCode].size()},
        {"x", placed.x.data(), placed.x.size()},
        {"ends", placed.ends.data(), placed.ends.size()},
        {"x_index", placed.x_index.data(), placed.x_index.size()},
        {"row_scale", placed.row_scale.data(), placed.row_scale.size()}};
    INFO("m " << m);
    check_waits(inputs, {{"y", placed.y.data(), placed.y.size()}}, stream,
                [&] { return placed.multiply(test, stream); });
  }
}
