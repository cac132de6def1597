// Several matmuls in one call on a GPU: against the product in binary64, against one call each, and
// in how many launches.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/matmul/skinny/args.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/families.hpp"
#include "support/force_matmul.hpp"
#include "support/matmul_cases.hpp"
#include "support/matmul_expected.hpp"
#include "validate.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

int batches() { return 2 * shapes_or(75); }
constexpr double kMostError[] = {1e-6, 5e-4, 4e-3};  // of kDtypes

using Outputs = std::vector<std::vector<uint8_t>>;
bool same(const Outputs &a, const Outputs &b) { return a == b; }  // which Catch2 need not print

// Products on the GPU: each buffer on a 256-byte boundary, or anywhere.
class Batch {
 public:
  Batch(Rng &rng, const std::vector<MatmulCase> &cases, bool aligned) {
    tensors_.reserve(cases.size());
    for (const MatmulCase &test : cases) {
      const auto add = [&](const std::vector<uint8_t> &bytes, int alignment) {
        buffers_.emplace_back(bytes.size(), aligned ? 0 : random_lead(rng, alignment));
        buffers_.back().write(bytes.data());
        return buffers_.back().data();
      };
      std::array<void *, kPartCount> parts{};
      for (int part = 0; part < kPartCount; ++part)
        if (test.weight.has(Part(part)))
          parts[part] =
              add(test.weight.bytes[part], part_alignment(Part(part), test.weight.nested()));
      tensors_.push_back(test.weight.at(parts));
      const int item = dtype_bytes(test.dtype);
      void *const x = add(test.x, item);
      void *const bias = add(test.bias, item);
      y_.emplace_back(test.y_bytes(), aligned ? 0 : random_lead(rng, item));
      args_.push_back(test.args(x, bias, y_.back().data()));
    }
    for (const nf4_tensor &tensor : tensors_) weights_.push_back(&tensor);
    size_t bytes = 0;
    REQUIRE(nf4_matmul_batch_workspace_size(weights_.data(), args_.data(), args_.size(), &bytes) ==
            NF4_STATUS_OK);
    workspace_.emplace_back(bytes);
  }

  nf4_status multiply(cudaStream_t stream) const {
    return nf4_matmul_batch_launch(weights_.data(), args_.data(), args_.size(),
                                   workspace_[0].data(), workspace_[0].size(), stream);
  }
  Outputs outputs(const Stream &stream) const {
    REQUIRE(multiply(stream) == NF4_STATUS_OK);
    return read(stream);
  }
  Outputs outputs_alone(const Stream &stream) const {
    for (size_t i = 0; i < args_.size(); ++i)
      REQUIRE(nf4_matmul_launch(weights_[i], &args_[i], workspace_[0].data(), workspace_[0].size(),
                                stream) == NF4_STATUS_OK);
    return read(stream);
  }
  // Poison again after it was read.
  Outputs read(const Stream &stream) const {
    stream.synchronize();
    Outputs outputs;
    for (const DeviceBuffer &y : y_) {
      outputs.push_back(y.read());
      if (y.size() != 0) fill_bytes(y.data(), 0xa5, y.size());
    }
    return outputs;
  }
  bool leads_intact() const {
    const auto intact = [](const DeviceBuffer &buffer) { return buffer.lead_intact(); };
    return std::all_of(buffers_.begin(), buffers_.end(), intact) &&
           std::all_of(y_.begin(), y_.end(), intact);
  }
  bool untouched() const {
    return std::all_of(y_.begin(), y_.end(), [](const DeviceBuffer &y) { return y.untouched(); });
  }
  std::vector<nf4_matmul_args> &args() { return args_; }

  // The rule of BatchLaunches: those that are alike go together as far as they fit.
  size_t expected_launches() const {
    std::vector<std::tuple<nf4_dtype, bool, int>> kinds;
    size_t launches = 0;
    for (size_t i = 0; i < args_.size(); ++i) {
      MatmulProblem problem;
      int config;
      REQUIRE(validate_matmul_shape(weights_[i], &args_[i], problem) == NF4_STATUS_OK);
      REQUIRE(validate_matmul_operands(weights_[i], &args_[i], nullptr, 0, problem) ==
              NF4_STATUS_OK);
      if (problem.empty()) continue;
      REQUIRE(cuda::matmul_config(problem, nullptr, config) == NF4_STATUS_OK);
      const bool skinny = cuda::is_skinny(config);
      const auto kind = std::make_tuple(problem.dtype, problem.weight.nested(), config);
      const auto before = std::count(kinds.begin(), kinds.end(), kind);
      launches += !skinny || before % cuda::kSkinnyBatchMax == 0;
      kinds.push_back(kind);
    }
    return launches;
  }
  // The launches that the library names: their number, and their kernels.
  size_t planned_launches() const {
    std::vector<int32_t> numbers(args_.size());
    std::vector<const char *> kernels(args_.size());
    REQUIRE(nf4_matmul_plan(weights_.data(), args_.data(), args_.size(), 0, numbers.data(),
                            kernels.data()) == NF4_STATUS_OK);
    for (size_t i = 0; i < args_.size(); ++i) REQUIRE((numbers[i] < 0) == (kernels[i] == nullptr));
    return static_cast<size_t>(*std::max_element(numbers.begin(), numbers.end()) + 1);
  }
  size_t launches(const Stream &stream) const {
    cudaGraph_t graph;
    size_t nodes = 0;
    REQUIRE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    REQUIRE(multiply(stream) == NF4_STATUS_OK);
    REQUIRE_CUDA(cudaStreamEndCapture(stream, &graph));
    REQUIRE_CUDA(cudaGraphGetNodes(graph, nullptr, &nodes));
    REQUIRE_CUDA(cudaGraphDestroy(graph));
    return nodes;
  }

 private:
  std::vector<DeviceBuffer> buffers_, y_, workspace_;
  std::vector<nf4_tensor> tensors_;
  std::vector<const nf4_tensor *> weights_;
  std::vector<nf4_matmul_args> args_;
};

struct Kind {
  nf4_dtype dtype;
  bool nested;
  MatmulShape shape;
};

std::vector<MatmulCase> plain_cases(Rng &rng, const std::vector<Kind> &kinds) {
  std::vector<MatmulCase> cases;
  for (const Kind &kind : kinds)
    cases.push_back(plain_matmul_case(rng, {kind.dtype, 64, kind.nested}, kind.shape));
  return cases;
}

double error_of(MatmulCase &test, const std::vector<uint8_t> &y) {
  std::array<void *, kPartCount> parts{};
  for (int part = 0; part < kPartCount; ++part)
    if (test.weight.has(Part(part))) parts[part] = test.weight.bytes[part].data();
  const nf4_tensor weight = test.weight.at(parts);
  RelativeError error;
  for (int64_t column = 0; column < test.m; ++column)
    for (int64_t row = 0; row < weight.rows; ++row)
      error.add(read_number(test.dtype, y.data(), column * test.y_stride + row),
                expect(test, weight, column, row).value);
  return error.value();
}

// Up to 7 products, most of them alike and such as skinny kernels take.
std::vector<MatmulCase> random_cases(Rng &rng) {
  constexpr XKind kKinds[] = {XKind::kOrdinary, XKind::kOutliers, XKind::kNotFinite};
  const nf4_dtype dtype = rng.pick(kDtypes);
  const bool nested = rng.one_in(2);
  const int64_t m = rng.between(1, 17);
  std::vector<MatmulCase> cases;
  for (int64_t count = rng.between(1, 7); count > 0; --count) {
    MatmulShape shape{rng.between(1, 300), rng.between(1, 20) * 64, m};
    if (rng.one_in(8)) shape.m = rng.between(0, 40);
    if (rng.one_in(8)) shape.cols = rng.between(0, 900);
    if (rng.one_in(10)) shape.rows = rng.one_in(3) ? 0 : rng.between(1, 5000);
    const CaseClass kind{rng.one_in(8) ? rng.pick(kDtypes) : dtype,
                         rng.one_in(4) ? rng.pick(kBlocksizes) : 64, nested != rng.one_in(8)};
    if (kind.dtype == NF4_DTYPE_FP32) shape.m = std::min<int64_t>(shape.m, kFp32RowsOfX);
    cases.push_back(
        random_matmul_case(rng, kind, random_codebook_kind(rng), shape, rng.pick(kKinds)));
  }
  return cases;
}

// Whether this GPU has skinny kernels of every dtype.
bool has_skinny_kernels() { return runnable_families()[0]->tensor_cores; }

}  // namespace

TEST_CASE("products in one call have the bits of one call each, on every family",
          "[cuda][matmul]") {
  const Stream stream;
  int fewer_launches = 0;
  for (int i = 0; i < batches(); ++i) {
    Rng rng(0xfb00000 + i);
    const std::vector<MatmulCase> cases = random_cases(rng);
    const Batch batch(rng, cases, !rng.one_in(4));
    for (const cuda::GpuFamily *family : runnable_families())
      for (const int config : {cuda::kMma64x64, cuda::kSkinny2, cuda::kSkinny8, cuda::kSkinny16}) {
        INFO("batch " << i << ", family " << family->name << ", "
                      << cuda::kMatmulConfigs[config].name);
        const ForcedMatmul forced(family, config);
        REQUIRE(same(batch.outputs(stream), batch.outputs_alone(stream)));
        const size_t launches = batch.launches(stream);  // of kernels that are loaded by now
        REQUIRE(launches == batch.expected_launches());
        REQUIRE(launches == batch.planned_launches());
        REQUIRE(batch.leads_intact());
        fewer_launches += launches < cases.size();
      }
  }
  if (has_skinny_kernels() && !few_shapes()) CHECK(fewer_launches > batches() / 2);
}

TEST_CASE("products in one call are those of binary64", "[cuda][matmul]") {
  const Stream stream;
  Rng rng(0xfc00000);
  for (const nf4_dtype dtype : kDtypes)
    for (const bool nested : {false, true})
      for (const int64_t m : {1, 2, 5, 8, 13, 16, 40}) {
        if (dtype == NF4_DTYPE_FP32 && m > kFp32RowsOfX) continue;
        std::vector<MatmulCase> cases =
            plain_cases(rng, {{dtype, nested, {rng.between(200, 900), 512, m}},
                              {dtype, nested, {rng.between(30, 150), 512, m}},
                              {dtype, nested, {rng.between(30, 50), 64 * rng.between(1, 30), m}},
                              {dtype, nested, {64, 1024, m}}});
        const Outputs outputs = Batch(rng, cases, true).outputs(stream);
        for (size_t i = 0; i < cases.size(); ++i) {
          INFO("product " << i << ": " << describe(cases[i], 0xfc00000));
          CHECK(error_of(cases[i], outputs[i]) <= kMostError[dtype - NF4_DTYPE_FP32]);
        }
      }
}

TEST_CASE("products that are alike share a launch", "[cuda][matmul]") {
  if (!has_skinny_kernels()) return;
  constexpr Kind kOne{NF4_DTYPE_BF16, true, {96, 256, 1}}, kTwo{NF4_DTYPE_BF16, true, {40, 64, 2}};
  constexpr Kind kThree{NF4_DTYPE_BF16, true, {96, 256, 3}},
      kNine{NF4_DTYPE_BF16, true, {96, 256, 9}};
  constexpr Kind kHalf{NF4_DTYPE_FP16, true, {96, 256, 1}};
  constexpr Kind kSingle{NF4_DTYPE_FP32, true, {96, 256, 1}};
  constexpr Kind kFlat{NF4_DTYPE_BF16, false, {96, 256, 1}};
  constexpr Kind kOdd{NF4_DTYPE_BF16, true, {96, 250, 1}};
  constexpr Kind kNone{NF4_DTYPE_BF16, true, {96, 256, 0}};
  const struct {
    std::vector<Kind> kinds;
    size_t launches;
  } batches[] = {
      {{kOne}, 1},
      {{kOne, kTwo}, 1},
      {{kOne, kTwo, kOne, kOne}, 1},
      {{kOne, kTwo, kOne, kOne, kOne}, 2},
      {{kOne, kThree, kOne, kThree}, 1},
      {{kOne, kNine, kOne, kNine}, 2},
      {{kOne, kHalf, kFlat, kOne}, 3},
      {{kSingle, kOne, kSingle}, fits_skinny(NF4_DTYPE_FP32) ? 2u : 3u},
      {{kOdd, kOne, kNone, kOdd, kOne}, 3},
      {{kNone, kNone}, 0},
      {std::vector<Kind>(NF4_MATMUL_BATCH_MAX, kOne), NF4_MATMUL_BATCH_MAX / 4},
  };
  const Stream stream;
  Rng rng(0xfd00000);
  for (const auto &each : batches) {
    INFO(each.kinds.size() << " products, expected launches " << each.launches);
    const std::vector<MatmulCase> cases = plain_cases(rng, each.kinds);
    CHECK(Batch(rng, cases, true).launches(stream) == each.launches);
  }
}

TEST_CASE("products in one call give the same bits 100 times, and from a graph",
          "[cuda][matmul][long]") {
  const Stream stream;
  Rng rng(0xfe00000);
  for (const int64_t m : {1, 7, 16}) {
    const std::vector<MatmulCase> cases =
        plain_cases(rng, {{NF4_DTYPE_BF16, true, {1000, 4096, m}},
                          {NF4_DTYPE_BF16, true, {250, 4096, m}},
                          {NF4_DTYPE_BF16, true, {250, 4096, m}},
                          {NF4_DTYPE_BF16, true, {77, 1024, 20}}});
    const Batch batch(rng, cases, true);
    const Outputs expected = batch.outputs(stream);
    cudaGraphExec_t graph =
        capture(stream, [&] { REQUIRE(batch.multiply(stream) == NF4_STATUS_OK); });
    for (int replay = 0; replay < replays(); ++replay) {
      REQUIRE_CUDA(cudaGraphLaunch(graph, stream));
      REQUIRE(same(batch.read(stream), expected));
    }
    REQUIRE_CUDA(cudaGraphExecDestroy(graph));
  }
}

TEST_CASE("one product that a GPU cannot do keeps all from being launched", "[cuda][matmul]") {
  const Stream stream;
  Rng rng(0xff00000);
  const Kind kind{NF4_DTYPE_BF16, true, {96, 256, 1}};
  const Kind fp32{NF4_DTYPE_FP32, true, {96, 256, kFp32RowsOfX + 1}};
  const std::vector<MatmulCase> cases = plain_cases(rng, {kind, kind, fp32});
  Batch batch(rng, cases, true);
  const auto refused = [&](const std::string &detail) {
    CHECK(batch.multiply(stream) == NF4_STATUS_INVALID_ARGUMENT);
    INFO("nf4_last_error(): " << nf4_last_error());
    CHECK(std::string(nf4_last_error()).find(detail) != std::string::npos);
    stream.synchronize();
    CHECK(batch.untouched());
  };
  nf4_matmul_args &last = batch.args().back();
  refused("product 2: dtype is 1 (fp32)");
  last = batch.args()[0];
  last.y = batch.args()[1].y;
  refused("y of product 1 overlaps y of product 2");
  int reaches = 0;
  REQUIRE_CUDA(cudaDeviceGetAttribute(&reaches, cudaDevAttrPageableMemoryAccess, 0));
  if (reaches != 0) return;
  std::vector<uint16_t> on_host(256);
  last = batch.args()[0];
  last.bias = nullptr;
  last.y = on_host.data();
  refused("y of product 2 is host memory");
}
