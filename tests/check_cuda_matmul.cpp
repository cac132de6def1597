// Every CUDA matmul kernel that this GPU runs against the product in binary64, on random
// shapes, strides, tails, alignments, blocksizes and tables.
#include <cuda_runtime.h>

#include <array>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "cuda/matmul/select.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/families.hpp"
#include "support/force_matmul.hpp"
#include "support/kernels.hpp"
#include "support/matmul_cases.hpp"
#include "support/matmul_expected.hpp"
#include "validate.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

constexpr nf4_dtype kDtypes16[] = {NF4_DTYPE_FP16, NF4_DTYPE_BF16};
// Per dtype and flat or nested; compute-sanitizer runs fewer.
int shapes() {
  const char *asked = std::getenv("NF4_TEST_SHAPES");
  return asked != nullptr ? 8 * std::atoi(asked) : 480;
}

// Enough for every kernel, as the data-centre GPUs of each generation from Ampere on have.
bool much_shared_memory() {
  int bytes = 0;
  REQUIRE_CUDA(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
  return bytes >= 160 << 10;
}

// A case on the GPU. Rows of x are on 16-byte boundaries now and then.
struct Placed {
  DeviceWeight weight;
  DeviceBuffer x, bias, y, workspace;

  Placed(Rng &rng, const MatmulCase &test)
      : weight(rng, test.weight),
        x(test.x.size(), random_lead(rng, 2)),
        bias(test.bias.size(), random_lead(rng, 2)),
        y(test.y_bytes(), random_lead(rng, 2)),
        workspace(workspace_bytes(test)) {
    x.write(test.x.data());
    bias.write(test.bias.data());
  }

  nf4_matmul_args args(const MatmulCase &test) const {
    return test.args(x.data(), bias.data(), y.data());
  }
  static size_t workspace_bytes(const MatmulCase &test) {
    size_t bytes = 0;
    const nf4_matmul_args args = test.args(nullptr, nullptr, nullptr);
    REQUIRE(nf4_matmul_workspace_size(&test.weight.shape, &args, &bytes) == NF4_STATUS_OK);
    return bytes;
  }
  // The shape of kernel that a launch uses: the forced one, or kTiled where that one cannot.
  cuda::MatmulShape used(const MatmulCase &test) const {
    const nf4_matmul_args given = args(test);
    MatmulProblem problem;
    REQUIRE(validate_matmul_shape(&weight.tensor(), &given, problem) == NF4_STATUS_OK);
    REQUIRE(validate_matmul_operands(&weight.tensor(), &given, nullptr, 0, problem) ==
            NF4_STATUS_OK);
    cuda::MatmulShape shape;
    REQUIRE(cuda::matmul_shape(problem, nullptr, shape) == NF4_STATUS_OK);
    return shape;
  }
  nf4_status multiply(const MatmulCase &test, cudaStream_t stream) const {
    const nf4_matmul_args given = args(test);
    return nf4_matmul_launch(&weight.tensor(), &given, workspace.data(), workspace.size(), stream);
  }
};

nf4_tensor in_place(HostWeight &weight) {
  std::array<void *, kPartCount> addresses{};
  for (int part = 0; part < kPartCount; ++part)
    if (weight.has(Part(part))) addresses[part] = weight.bytes[part].data();
  return weight.at(addresses);
}

// Numbers of 16 bits are rounded once before they are multiplied: the codebook's entries over
// the largest of them, or those times the scale. Sums are in binary32.
bool is_right(const MatmulCase &test, const Expected &expected, double y) {
  const bool bf16 = test.dtype == NF4_DTYPE_BF16;
  if (!std::isfinite(expected.value)) return !std::isfinite(y);
  const double largest = bf16 ? 0x1p126 : 65000;
  if (expected.magnitude > 0x1p126 || expected.largest > largest) return true;
  const double unit = bf16 ? 0x1p-8 : 0x1p-11;
  const double sums = static_cast<double>(test.weight.shape.cols) / 8 + 64;
  const double underflow = bf16 ? 0x1p-126 : 0x1p-24;
  const double error = (unit + sums * 0x1p-24) * expected.magnitude + underflow * expected.coarse;
  return y >= round_to(test.dtype, expected.value - error) &&
         y <= round_to(test.dtype, expected.value + error);
}

// What lies between the rows of y is as it was.
bool gaps_intact(const MatmulCase &test, const std::vector<uint8_t> &y) {
  const int64_t stride = test.y_stride * 2, row = test.weight.shape.rows * 2;
  for (int64_t i = 0; i < static_cast<int64_t>(y.size()); ++i)
    if (i % stride >= row && y[i] != 0xa5) return false;
  return true;
}

// How often each shape of kernel of each family did the work.
using Counts = std::map<const cuda::MatmulFamily *, std::array<int, cuda::kMatmulShapes>>;

// The whole of y, as is_right alone would not miss a column of thousands. Sums of so many numbers
// of either sign are about as large as the root of the sum of their squares.
bool is_right_on_average(const MatmulCase &test, const std::vector<Expected> &expected,
                         const std::vector<uint8_t> &y) {
  const int64_t rows = test.weight.shape.rows;
  double squares = 0, energy = 0;
  for (int64_t i = 0; i < test.m * rows; ++i) {
    const double got = read_number(test.dtype, y.data(), i / rows * test.y_stride + i % rows);
    squares += (got - expected[i].value) * (got - expected[i].value);
    energy += expected[i].energy;
  }
  const double most = test.dtype == NF4_DTYPE_BF16 ? 4e-3 : 5e-4;
  return squares <= most * most * energy;
}

enum class Judged { kEach, kEachAndAll };

// The first number of y that is wrong, or -1. An assertion for each would take most of the time.
int64_t first_wrong(const MatmulCase &test, const std::vector<Expected> &expected,
                    const std::vector<uint8_t> &y, double &got) {
  const int64_t rows = test.weight.shape.rows;
  for (int64_t i = 0; i < test.m * rows; ++i) {
    got = read_number(test.dtype, y.data(), i / rows * test.y_stride + i % rows);
    if (!is_right(test, expected[i], got)) return i;
  }
  return -1;
}

void check_matmul(MatmulCase &test, Rng &rng, const Stream &stream, Counts &counts,
                  Judged judged = Judged::kEach) {
  const std::vector<Expected> expected = expect_all(test, in_place(test.weight));
  const int64_t rows = test.weight.shape.rows;
  const Placed placed(rng, test);
  for (const cuda::MatmulFamily *family : runnable(cuda::matmul_families())) {
    for (int i = 0; i < cuda::kMatmulShapes; ++i) {
      const auto shape = static_cast<cuda::MatmulShape>(i);
      INFO("family " << family->family.name << ", shape " << cuda::matmul_shape_name(shape));
      const ForcedMatmul forced(family, shape);
      if (placed.used(test) != shape) continue;
      ++counts[family][i];
      if (placed.y.size() != 0) fill_bytes(placed.y.data(), 0xa5, placed.y.size());
      REQUIRE(placed.multiply(test, stream) == NF4_STATUS_OK);
      stream.synchronize();
      const std::vector<uint8_t> y = placed.y.read();
      double got = 0;
      const int64_t wrong = first_wrong(test, expected, y, got);
      if (wrong >= 0)
        FAIL("y[" << wrong / rows << "][" << wrong % rows << "] is " << got << ", expected "
                  << expected[wrong].value << ", of the magnitude " << expected[wrong].magnitude);
      if (judged == Judged::kEachAndAll) REQUIRE(is_right_on_average(test, expected, y));
      REQUIRE(gaps_intact(test, y));
      REQUIRE(placed.y.lead_intact());
      REQUIRE(placed.weight.leads_intact());
    }
  }
}

// Shapes of which most are those of the few-row kernels or of the wide ones.
MatmulShape random_shape_for_gpu(Rng &rng) {
  MatmulShape shape = random_matmul_shape(rng);
  constexpr int64_t kLargestM[] = {2, 2, 2, 8, 20};
  if (rng.one_in(4)) {
    shape.cols = rng.between(1, rng.one_in(4) ? 60 : 10) * 64;
    shape.m = rng.between(17, rng.one_in(4) ? 600 : 150);
    shape.rows = rng.between(1, 500000 / (shape.cols * shape.m) + 1);
    return shape;
  }
  if (!rng.one_in(5)) {
    shape.cols = rng.between(1, 40) * 64;
    shape.m = rng.between(1, rng.pick(kLargestM));
    shape.rows = rng.between(1, 400000 / (shape.cols * shape.m) + 1);
  }
  return shape;
}

}  // namespace

TEST_CASE("every kernel multiplies within the rounding of its factors", "[cuda][matmul]") {
  constexpr XKind kKinds[] = {XKind::kOrdinary, XKind::kOutliers, XKind::kNotFinite};
  const Stream stream;
  Counts counts;
  uint64_t number = 0xb000000;
  for (const nf4_dtype dtype : kDtypes16)
    for (const bool nested : {false, true})
      for (int i = 0; i < shapes(); ++i) {
        Rng rng(++number);
        const CaseClass kind{dtype, rng.pick(kBlocksizes), nested};
        MatmulCase test = random_matmul_case(rng, kind, rng.pick(kCodebookKinds),
                                             random_shape_for_gpu(rng), rng.pick(kKinds));
        INFO(describe(test, number));
        check_matmul(test, rng, stream, counts);
      }
  const int least = std::getenv("NF4_TEST_SHAPES") != nullptr ? 1 : shapes() / 8;
  for (const auto &[family, of_shapes] : counts)
    for (int shape = 0; shape < cuda::kMatmulShapes; ++shape) {
      INFO("family " << family->family.name << ", shape "
                     << cuda::matmul_shape_name(static_cast<cuda::MatmulShape>(shape)));
      if (cuda::matmul_has(*family, static_cast<cuda::MatmulShape>(shape), compute_capability()) &&
          (shape == cuda::kTiled || much_shared_memory()))
        CHECK(of_shapes[shape] >= least);
    }
}

// Shapes in which a thread block's rows or columns take more than one turn.
TEST_CASE("every kernel multiplies weights of many rows or columns", "[cuda][matmul][long]") {
  const Stream stream;
  Counts counts;
  uint64_t number = 0xb800000;
  for (const bool nested : {false, true})
    for (const MatmulShape shape :
         {MatmulShape{13000, 64, 9}, MatmulShape{4300, 320, 2}, MatmulShape{200, 8960, 2},
          MatmulShape{140, 8192, 8}, MatmulShape{135, 12288, 16}}) {
      Rng rng(++number);
      MatmulCase test = plain_matmul_case(rng, {NF4_DTYPE_BF16, 64, nested}, shape);
      INFO(describe(test, number));
      check_matmul(test, rng, stream, counts, Judged::kEachAndAll);
    }
}

TEST_CASE("tiles that do not fill the GPU become halves", "[cuda][matmul][long]") {
  const Stream stream;
  Counts counts;
  Rng rng(0xf000000);
  // One tile more than an H100 or H200 has multiprocessors, and rows of x in both of its halves.
  MatmulCase test = plain_matmul_case(rng, {NF4_DTYPE_BF16, 64, true}, {133 * 128 - 5, 64, 140});
  check_matmul(test, rng, stream, counts, Judged::kEachAndAll);
}

TEST_CASE("a matmul gives the same bits 100 times, and from a graph", "[cuda][matmul][long]") {
  const Stream stream;
  for (const MatmulShape shape :
       {MatmulShape{1000, 4096, 1}, MatmulShape{1000, 1536, 7}, MatmulShape{777, 2048, 16},
        MatmulShape{300, 1100, 70}, MatmulShape{520, 4096, 64}, MatmulShape{8500, 256, 513}}) {
    Rng rng(0xc000000 + shape.m);
    const MatmulCase test = random_matmul_case(rng, {NF4_DTYPE_BF16, 64, true}, CodebookKind::kNf4,
                                               shape, XKind::kOutliers);
    const Placed placed(rng, test);
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

// In a process of its own, as the first use of CUDA: kernels are loaded, and get their shared
// memory, while capturing.
TEST_CASE("matmuls that nothing has warmed up are captured", "[.cold]") {
  Rng rng(0xda00000);
  const CaseClass kind{NF4_DTYPE_BF16, 64, true};
  const MatmulCase few =
      random_matmul_case(rng, kind, CodebookKind::kNf4, {300, 1024, 1}, XKind::kOrdinary);
  const MatmulCase many =
      random_matmul_case(rng, kind, CodebookKind::kNf4, {300, 1024, 64}, XKind::kOrdinary);
  const Placed placed_few(rng, few), placed_many(rng, many);
  const Stream stream;
  cudaGraphExec_t graph = capture(stream, [&] {
    REQUIRE(placed_few.multiply(few, stream) == NF4_STATUS_OK);
    REQUIRE(placed_many.multiply(many, stream) == NF4_STATUS_OK);
  });
  REQUIRE_CUDA(cudaGraphLaunch(graph, stream));
  stream.synchronize();
  const std::vector<uint8_t> of_few = placed_few.y.read(), of_many = placed_many.y.read();
  fill_bytes(placed_few.y.data(), 0xa5, placed_few.y.size());
  fill_bytes(placed_many.y.data(), 0xa5, placed_many.y.size());
  REQUIRE(placed_few.multiply(few, stream) == NF4_STATUS_OK);
  REQUIRE(placed_many.multiply(many, stream) == NF4_STATUS_OK);
  stream.synchronize();
  CHECK(same_bytes(placed_few.y.read(), of_few));
  CHECK(same_bytes(placed_many.y.read(), of_many));
  REQUIRE_CUDA(cudaGraphExecDestroy(graph));
}

// Launches may start while their predecessor runs, which this one invites them to.
TEST_CASE("a matmul waits for what a predecessor writes late", "[cuda][matmul][long]") {
  const Stream stream;
  constexpr long long kEnoughToStart = 2'000'000;
  uint64_t number = 0xd800000;
  for (const int64_t m : {1, 8, 16, 40, 200, 1, 8, 16, 40, 200})  // some are where vectors load
    for (const CaseClass &kind :
         {CaseClass{NF4_DTYPE_BF16, 64, true}, CaseClass{NF4_DTYPE_FP16, 64, false}}) {
      Rng rng(++number);
      MatmulCase test =
          random_matmul_case(rng, kind, kind.nested ? CodebookKind::kNf4 : CodebookKind::kSorted,
                             {300, 2048, m}, XKind::kOrdinary);
      test.bias.assign(300 * 2, 0x3c);
      const Placed placed(rng, test);
      REQUIRE(placed.multiply(test, stream) == NF4_STATUS_OK);
      stream.synchronize();
      const std::vector<uint8_t> expected = placed.y.read();
      const nf4_tensor &weight = placed.weight.tensor();
      const struct {
        const char *name;
        const void *address;  // NULL: there is none
        size_t bytes;
      } parts[] = {
          {"packed", weight.packed, test.weight.bytes[kPacked].size()},
          {"absmax", weight.absmax, test.weight.bytes[kAbsmax].size()},
          {"nested_absmax", weight.nested_absmax, test.weight.bytes[kNestedAbsmax].size()},
          {"nested_code", weight.nested_code, test.weight.bytes[kNestedCode].size()},
          {"nested_offset", weight.nested_offset, test.weight.bytes[kNestedOffset].size()},
          {"codebook", weight.codebook, test.weight.bytes[kCodebook].size()},
          {"x", placed.x.data(), placed.x.size()},
          {"bias", placed.bias.data(), placed.bias.size()},
      };
      for (const auto &part : parts) {
        if (part.address == nullptr) continue;
        INFO("m " << m << ", " << part.name);
        auto *const address = static_cast<uint8_t *>(const_cast<void *>(part.address));
        const DeviceBuffer source(part.bytes);
        REQUIRE_CUDA(cudaMemcpy(source.data(), address, part.bytes, cudaMemcpyDeviceToDevice));
        fill_bytes(address, 0, part.bytes);
        fill_bytes(placed.y.data(), 0xa5, placed.y.size());
        REQUIRE_CUDA(cudaDeviceSynchronize());
        launch_late_copy(address, source.data<uint8_t>(), part.bytes, kEnoughToStart, stream);
        REQUIRE(placed.multiply(test, stream) == NF4_STATUS_OK);
        stream.synchronize();
        CHECK(same_bytes(placed.y.read(), expected));
      }
    }
}

TEST_CASE("a matmul of fp32 is refused on a GPU, and an empty one is nothing", "[cuda][matmul]") {
  const Stream stream;
  Rng rng(0xd000000);
  const CaseClass kind{NF4_DTYPE_BF16, 64, false};
  for (const MatmulShape shape : {MatmulShape{5, 64, 0}, MatmulShape{0, 64, 3}}) {
    const MatmulCase test =
        random_matmul_case(rng, kind, CodebookKind::kNf4, shape, XKind::kOrdinary);
    CHECK(Placed(rng, test).multiply(test, stream) == NF4_STATUS_OK);
  }
  MatmulCase test = random_matmul_case(rng, kind, CodebookKind::kNf4, {5, 64, 2}, XKind::kOrdinary);
  const Placed placed(rng, test);
  test.dtype = NF4_DTYPE_FP32;
  CHECK(placed.multiply(test, stream) == NF4_STATUS_INVALID_ARGUMENT);
  stream.synchronize();
  CHECK(placed.y.untouched());
}

TEST_CASE("a matmul of a nested weight of no columns, without pointers, is the bias",
          "[cuda][matmul]") {
  const Stream stream;
  const DeviceBuffer y(37 * 2);
  std::vector<uint8_t> numbers(37 * 2);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<uint8_t>(i);
  DeviceBuffer given(37 * 2);
  given.write(numbers.data());
  nf4_tensor weight{};
  weight.struct_size = sizeof weight;
  weight.format = NF4_FORMAT_NF4;
  weight.blocksize = 64;
  weight.nested_blocksize = 256;
  weight.rows = 37;
  nf4_matmul_args args{};
  args.struct_size = sizeof args;
  args.dtype = NF4_DTYPE_BF16;
  args.m = 1;
  args.bias = given.data();
  args.y = y.data();
  args.y_stride = 37;
  REQUIRE(nf4_matmul_launch(&weight, &args, nullptr, 0, stream) == NF4_STATUS_OK);
  stream.synchronize();
  CHECK(same_bytes(y.read(), numbers));
}

TEST_CASE("a matmul of no columns is the bias", "[cuda][matmul]") {
  const Stream stream;
  Counts counts;
  Rng rng(0xe000000);
  for (int i = 0; i < 4; ++i) {
    MatmulCase test = random_matmul_case(rng, {NF4_DTYPE_FP16, 64, false}, CodebookKind::kNf4,
                                         {37, 0, 3}, XKind::kOrdinary);
    check_matmul(test, rng, stream, counts);
  }
}
