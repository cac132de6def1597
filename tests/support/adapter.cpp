#include "support/adapter.hpp"

#include <cstring>

#include "core/float16.hpp"
#include "cuda/matmul/matmul.hpp"
#include "support/catch.hpp"
#include "validate.hpp"

namespace nf4::test {

namespace {

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

nf4_lora lora_of(const HostAdapter &adapter) {
  nf4_lora lora{};
  lora.struct_size = sizeof lora;
  lora.dtype = adapter.dtype;
  lora.rank = adapter.rank;
  lora.scale = adapter.scale;
  lora.a_stride = adapter.a_stride;
  lora.b_stride = adapter.b_stride;
  return lora;
}
size_t workspace_bytes(const MatmulCase &test, const HostAdapter &adapter,
                       const PlacedMatmul &placed) {
  const nf4_lora lora = lora_of(adapter);
  nf4_matmul_args args = test.args(nullptr, nullptr, nullptr);
  args.lora = &lora;
  size_t bytes = 0;
  REQUIRE((test.gradient ? nf4_matmul_grad_workspace_size : nf4_matmul_workspace_size)(
              &placed.weight.tensor(), &args, &bytes) == NF4_STATUS_OK);
  return bytes;
}

}  // namespace

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

PlacedAdapter::PlacedAdapter(Rng &rng, const MatmulCase &test, const HostAdapter &adapter,
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

nf4_status PlacedAdapter::multiply(const PlacedMatmul &placed, cudaStream_t stream) const {
  const auto launch = gradient ? nf4_matmul_grad_launch : nf4_matmul_launch;
  return launch(&placed.weight.tensor(), &args, workspace.data(), workspace.size(), stream);
}

MatmulProblem PlacedAdapter::problem(const PlacedMatmul &placed) const {
  const nf4_tensor &weight = placed.weight.tensor();
  const auto bytes = static_cast<int64_t>(workspace.size());
  MatmulProblem problem{};
  problem.gradient = gradient;
  REQUIRE(validate_matmul_shape(&weight, &args, problem) == NF4_STATUS_OK);
  REQUIRE(validate_matmul_operands(&weight, &args, workspace.data(), bytes, problem) ==
          NF4_STATUS_OK);
  return problem;
}

int PlacedAdapter::used(const PlacedMatmul &placed) const {
  const MatmulProblem problem = this->problem(placed);
  int config = -1;
  REQUIRE((gradient ? cuda::matmul_grad_config(problem, nullptr, config)
                    : cuda::matmul_config(problem, nullptr, config)) == NF4_STATUS_OK);
  return config;
}

}  // namespace nf4::test
