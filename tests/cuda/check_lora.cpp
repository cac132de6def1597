// Adapters (LoRA) beside a product: every CUDA matmul kernel that this GPU runs, against the sums
// in binary64.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/float16.hpp"
#include "cuda/matmul/matmul.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/families.hpp"
#include "support/force_matmul.hpp"
#include "support/late_inputs.hpp"
#include "support/matmul_cases.hpp"
#include "support/matmul_expected.hpp"
#include "support/matmul_placed.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

struct HostAdapter {
  nf4_dtype dtype;
  int rank;
  float scale;
  int64_t a_stride, b_stride;
  std::vector<uint8_t> a, b;  // from the first to the last element; NaN between the rows
};

std::vector<uint8_t> random_matrix(Rng &rng, nf4_dtype dtype, int64_t rows, int64_t cols,
                                   int64_t stride, float size) {
  const int bytes = dtype_bytes(dtype);
  std::vector<uint8_t> matrix(((rows - 1) * stride + cols) * bytes, 0xff);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < cols; ++i) {
      const auto number = static_cast<float>(round_to(dtype, size * rng.normal()));
      const uint16_t bits = dtype == NF4_DTYPE_FP16 ? float_to_half(number) : float_to_bf16(number);
      const void *from = dtype == NF4_DTYPE_FP32 ? static_cast<const void *>(&number) : &bits;
      std::memcpy(&matrix[(row * stride + i) * bytes], from, bytes);
    }
  return matrix;
}

// Of about the size of the product that it is beside.
HostAdapter random_adapter(Rng &rng, const MatmulCase &test, nf4_dtype dtype, int rank,
                           bool padded) {
  const int64_t rows = test.weight.shape.rows, cols = test.weight.shape.cols;
  HostAdapter adapter{dtype, rank, 0.75f, cols, rank, {}, {}};
  if (padded) {
    adapter.a_stride += rng.between(1, 20);
    adapter.b_stride += rng.between(1, 20);
  }
  adapter.a = random_matrix(rng, dtype, rank, cols, adapter.a_stride, 1);
  adapter.b = random_matrix(rng, dtype, rows, rank, adapter.b_stride, 1);
  return adapter;
}

struct PlacedAdapter {
  DeviceBuffer a, b, product, workspace;
  nf4_lora lora{};
  nf4_matmul_args args;
  bool gradient;

  PlacedAdapter(Rng &rng, const MatmulCase &test, const HostAdapter &adapter,
                const PlacedMatmul &placed, bool aligned, bool with_product)
      : a(adapter.a.size(), aligned ? 0 : random_lead(rng, dtype_bytes(adapter.dtype))),
        b(adapter.b.size(), aligned ? 0 : random_lead(rng, dtype_bytes(adapter.dtype))),
        product(test.m * adapter.rank * dtype_bytes(test.dtype)),
        workspace(workspace_bytes(test, adapter, placed), 64),
        args(placed.args(test)),
        gradient(test.gradient) {
    a.write(adapter.a.data());
    b.write(adapter.b.data());
    lora = lora_of(adapter);
    lora.a = a.data();
    lora.b = b.data();
    lora.product = with_product ? product.data() : nullptr;
    args.lora = &lora;
  }
  PlacedAdapter(const PlacedAdapter &) = delete;
  PlacedAdapter &operator=(const PlacedAdapter &) = delete;

  nf4_status multiply(const PlacedMatmul &placed, cudaStream_t stream) const {
    const auto launch = gradient ? nf4_matmul_grad_launch : nf4_matmul_launch;
    return launch(&placed.weight.tensor(), &args, workspace.data(), workspace.size(), stream);
  }

 private:
  static nf4_lora lora_of(const HostAdapter &adapter) {
    nf4_lora lora{};
    lora.struct_size = sizeof lora;
    lora.dtype = adapter.dtype;
    lora.rank = adapter.rank;
    lora.scale = adapter.scale;
    lora.a_stride = adapter.a_stride;
    lora.b_stride = adapter.b_stride;
    return lora;
  }
  static size_t workspace_bytes(const MatmulCase &test, const HostAdapter &adapter,
                                const PlacedMatmul &placed) {
    const nf4_lora lora = lora_of(adapter);
    nf4_matmul_args args = test.args(nullptr, nullptr, nullptr);
    args.lora = &lora;
    size_t bytes = 0;
    REQUIRE((test.gradient ? nf4_matmul_grad_workspace_size : nf4_matmul_workspace_size)(
                &placed.weight.tensor(), &args, &bytes) == NF4_STATUS_OK);
    return bytes;
  }
};

nf4_tensor in_place(HostWeight &weight) {
  std::array<void *, kPartCount> addresses{};
  for (int part = 0; part < kPartCount; ++part)
    if (weight.has(Part(part))) addresses[part] = weight.bytes[part].data();
  return weight.at(addresses);
}

// An element of what x is multiplied by, A or in the gradient B, and of what that product is.
double in_element(const MatmulCase &test, const HostAdapter &adapter, int r, int64_t k) {
  return test.gradient ? read_number(adapter.dtype, adapter.b.data(), k * adapter.b_stride + r)
                       : read_number(adapter.dtype, adapter.a.data(), r * adapter.a_stride + k);
}
double out_element(const MatmulCase &test, const HostAdapter &adapter, int r, int64_t column) {
  return test.gradient
             ? read_number(adapter.dtype, adapter.a.data(), r * adapter.a_stride + column)
             : read_number(adapter.dtype, adapter.b.data(), column * adapter.b_stride + r);
}

// x A^T, or dY B, in binary64: [m][rank].
std::vector<double> exact_product(const MatmulCase &test, const HostAdapter &adapter) {
  std::vector<double> product;
  for (int64_t i = 0; i < test.m; ++i)
    for (int r = 0; r < adapter.rank; ++r) {
      double sum = 0;
      for (int64_t k = 0; k < test.x_columns(); ++k)
        sum += read_number(test.dtype, test.x.data(), i * test.x_stride + k) *
               in_element(test, adapter, r, k);
      product.push_back(sum);
    }
  return product;
}

// Errors by norm: of 16 bits, those of rounding what is multiplied and the output.
double most_error(nf4_dtype dtype) {
  return dtype == NF4_DTYPE_FP32 ? 2e-6 : dtype == NF4_DTYPE_BF16 ? 4e-3 : 5e-4;
}

struct ExpectedLora {
  std::vector<double> product, y;

  ExpectedLora(MatmulCase &test, const HostAdapter &adapter)
      : product(exact_product(test, adapter)) {
    const ExpectedProduct base(test, in_place(test.weight));
    const int64_t columns = test.y_columns();
    for (int64_t i = 0; i < test.m; ++i)
      for (int64_t column = 0; column < columns; ++column) {
        double sum = 0;
        for (int r = 0; r < adapter.rank; ++r)
          sum += product[i * adapter.rank + r] * out_element(test, adapter, r, column);
        y.push_back(base[i * columns + column].value + adapter.scale * sum);
      }
  }

  // By rows of x and by columns of y, so that a wrong one is not lost among the others.
  void check(const MatmulCase &test, const std::vector<uint8_t> &got) const {
    const int64_t rows = test.y_columns();
    std::vector<RelativeError> of_m(test.m), of_row(rows);
    RelativeError all;
    for (int64_t i = 0; i < test.m * rows; ++i) {
      const double each = read_number(test.dtype, got.data(), i / rows * test.y_stride + i % rows);
      of_m[i / rows].add(each, y[i]);
      of_row[i % rows].add(each, y[i]);
      all.add(each, y[i]);
    }
    const auto bound = [&](const std::vector<RelativeError> &errors) {
      double most = 0;
      for (const RelativeError &error : errors)
        most = std::max(most,
                        std::sqrt(error.error / (all.norm / static_cast<double>(errors.size()))));
      return most;
    };
    CHECK(all.value() <= most_error(test.dtype));
    CHECK(bound(of_m) <= 10 * most_error(test.dtype));
    CHECK(bound(of_row) <= 10 * most_error(test.dtype));
  }
  void check_product(const MatmulCase &test, const std::vector<uint8_t> &got) const {
    RelativeError error;
    for (size_t i = 0; i < product.size(); ++i)
      error.add(read_number(test.dtype, got.data(), static_cast<int64_t>(i)), product[i]);
    CHECK(error.value() <= most_error(test.dtype));
  }
};

// Every kernel that takes the case, aligned and as it comes.
void check_lora(MatmulCase &test, const HostAdapter &adapter, Rng &rng, const Stream &stream,
                MatmulCounts &counts) {
  const ExpectedLora expected(test, adapter);
  for (const bool aligned : {false, true}) {
    const PlacedMatmul placed(rng, test, aligned);
    const PlacedAdapter with(rng, test, adapter, placed, aligned, rng.one_in(2) || !aligned);
    for (const cuda::GpuFamily *family : runnable_families())
      for (int config = 0; config < cuda::kMatmulConfigCount; ++config) {
        INFO("family " << family->name << ", " << cuda::kMatmulConfigs[config].name
                       << (aligned ? ", aligned" : ""));
        const ForcedMatmul forced(family, config);
        if (placed.used(test) != config) continue;
        ++counts[family][config];
        fill_bytes(placed.y.data(), 0xa5, placed.y.size());
        fill_bytes(with.product.data(), 0xa5, with.product.size());
        fill_bytes(with.workspace.data(), 0xff, with.workspace.size());
        REQUIRE(with.multiply(placed, stream) == NF4_STATUS_OK);
        stream.synchronize();
        const std::vector<uint8_t> y = placed.y.read();
        expected.check(test, y);
        if (with.lora.product != nullptr) expected.check_product(test, with.product.read());
        if (with.lora.product == nullptr) CHECK(with.product.untouched());
        CHECK(placed.y.lead_intact());
        CHECK(with.workspace.lead_intact());
        REQUIRE(with.multiply(placed, stream) == NF4_STATUS_OK);
        stream.synchronize();
        CHECK(same_bytes(placed.y.read(), y));
      }
  }
}

int multiprocessors() {
  int count = 0;
  REQUIRE_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  return count;
}

}  // namespace

TEST_CASE("every kernel adds an adapter", "[cuda][matmul][lora]") {
  const Stream stream;
  MatmulCounts counts;
  constexpr MatmulShape kShapes[] = {{130, 1536, 2}, {140, 3072, 9},  {75, 500, 5}, {130, 1536, 17},
                                     {300, 512, 70}, {264, 512, 310}, {20, 333, 40}};
  constexpr int kRanks[] = {1, 8, 16, 40, 64, 128};
  uint64_t number = 0xb900000;
  for (const nf4_dtype dtype : {NF4_DTYPE_FP32, NF4_DTYPE_FP16, NF4_DTYPE_BF16})
    for (const MatmulShape &shape : kShapes)
      for (int i = 0; i < (few_shapes() ? 1 : 3); ++i) {
        if (dtype == NF4_DTYPE_FP32 && shape.m > kFp32RowsOfX) continue;
        Rng rng(++number);
        MatmulCase test = plain_matmul_case(rng, {dtype, 64, rng.one_in(2)}, shape);
        const nf4_dtype factors = rng.one_in(2) ? NF4_DTYPE_FP32 : dtype;
        const HostAdapter adapter =
            random_adapter(rng, test, factors, rng.pick(kRanks), rng.one_in(3));
        INFO(describe(test, number) << ", rank " << adapter.rank << " of dtype " << factors);
        check_lora(test, adapter, rng, stream, counts);
      }
  if (!few_shapes())
    for (const cuda::GpuFamily *family : runnable_families())
      CHECK(counts[family][cuda::kMma64x64] > 0);
}

TEST_CASE("every kernel of the gradient adds an adapter", "[cuda][matmul][lora]") {
  const Stream stream;
  MatmulCounts counts;
  // The second is such as a skinny kernel takes without an adapter.
  constexpr MatmulShape kShapes[] = {{1536, 128, 2, true},
                                     {1024, 256, 9, true},
                                     {512, 264, 70, true},
                                     {512, 320, 310, true},
                                     {333, 20, 40, true}};
  constexpr int kRanks[] = {1, 8, 16, 40, 64, 128};
  uint64_t number = 0xbc00000;
  for (const nf4_dtype dtype : {NF4_DTYPE_FP32, NF4_DTYPE_FP16, NF4_DTYPE_BF16})
    for (const MatmulShape &shape : kShapes)
      for (int i = 0; i < (few_shapes() ? 1 : 3); ++i) {
        Rng rng(++number);
        MatmulCase test = plain_matmul_case(rng, {dtype, 64, rng.one_in(2)}, shape);
        const nf4_dtype factors = rng.one_in(2) ? NF4_DTYPE_FP32 : dtype;
        const HostAdapter adapter =
            random_adapter(rng, test, factors, rng.pick(kRanks), rng.one_in(3));
        INFO(describe(test, number) << ", rank " << adapter.rank << " of dtype " << factors);
        check_lora(test, adapter, rng, stream, counts);
      }
}

// The CTA that has a tile's last K-tile adds the adapter.
TEST_CASE("stream-K kernels add an adapter once", "[cuda][matmul][lora]") {
  const Stream stream;
  uint64_t number = 0xba00000;
  for (const int rank : {16, 128}) {
    Rng rng(++number);
    MatmulCase test = plain_matmul_case(rng, {NF4_DTYPE_BF16, 64, true},
                                        {(multiprocessors() / 2 + 1) * 128 - 5, 1024, 100});
    repeat_rows(test, rng, 4);
    const HostAdapter adapter = random_adapter(rng, test, NF4_DTYPE_BF16, rank, false);
    MatmulCounts counts;
    INFO(describe(test, number));
    check_lora(test, adapter, rng, stream, counts);
  }
}

// Whose product's kernel and the base product's start early.
TEST_CASE("a product with an adapter waits for what a predecessor writes late",
          "[cuda][matmul][lora][long]") {
  const Stream stream;
  uint64_t number = 0xbb00000;
  for (const int64_t m : {1, 16, 40, 300}) {
    Rng rng(++number);
    MatmulCase test = plain_matmul_case(rng, {NF4_DTYPE_BF16, 64, true}, {300, 2048, m});
    for (const nf4_dtype dtype : {NF4_DTYPE_BF16, NF4_DTYPE_FP32}) {
      const HostAdapter adapter = random_adapter(rng, test, dtype, 16, false);
      const PlacedMatmul placed(rng, test, true);
      const PlacedAdapter with(rng, test, adapter, placed, true, true);
      const nf4_tensor &weight = placed.weight.tensor();
      INFO("m " << m);
      check_waits({{"packed", weight.packed, test.weight.bytes[kPacked].size()},
                   {"x", placed.x.data(), placed.x.size()},
                   {"a", with.a.data(), with.a.size()},
                   {"b", with.b.data(), with.b.size()},
                   {"workspace", with.workspace.data(), with.workspace.size()}},
                  {{"y", placed.y.data(), placed.y.size()},
                   {"product", with.product.data(), with.product.size()}},
                  stream, [&] { return with.multiply(placed, stream); });
    }
  }
}
