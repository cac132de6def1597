// CUDA matmuls of nothing: no rows, no columns, no x; and what is refused.
#include <vector>

#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/kernels.hpp"
#include "support/matmul_cases.hpp"
#include "support/matmul_placed.hpp"

using namespace nf4;
using namespace nf4::test;

TEST_CASE("a matmul of fp32 and many rows is refused on a GPU, and an empty one is nothing",
          "[cuda][matmul]") {
  const Stream stream;
  Rng rng(0xd000000);
  const CaseClass kind{NF4_DTYPE_BF16, 64, false};
  for (const MatmulShape shape : {MatmulShape{5, 64, 0}, MatmulShape{0, 64, 3}}) {
    const MatmulCase test =
        random_matmul_case(rng, kind, CodebookKind::kNf4, shape, XKind::kOrdinary);
    CHECK(PlacedMatmul(rng, test, false).multiply(test, stream) == NF4_STATUS_OK);
  }
  const CaseClass fp32{NF4_DTYPE_FP32, 64, false};
  const MatmulCase test = random_matmul_case(rng, fp32, CodebookKind::kNf4,
                                             {5, 64, kFp32RowsOfX + 1}, XKind::kOrdinary);
  const PlacedMatmul placed(rng, test, false);
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
  MatmulCounts counts;
  Rng rng(0xe000000);
  for (int i = 0; i < 4; ++i) {
    MatmulCase test = random_matmul_case(rng, {NF4_DTYPE_FP16, 64, false}, CodebookKind::kNf4,
                                         {37, 0, 3}, XKind::kOrdinary);
    check_matmul(test, rng, stream, counts);
  }
}
