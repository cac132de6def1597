// The sizes of tensors, from none to the largest.
#include <cstdint>
#include <string>
#include <utility>

#include "nf4/nf4.h"
#include "support/catch.hpp"

namespace {

nf4_tensor shape(int64_t rows, int64_t cols, int blocksize, int nested_blocksize) {
  nf4_tensor tensor{};
  tensor.struct_size = sizeof tensor;
  tensor.format = NF4_FORMAT_NF4;
  tensor.blocksize = blocksize;
  tensor.nested_blocksize = nested_blocksize;
  tensor.rows = rows;
  tensor.cols = cols;
  return tensor;
}

nf4_sizes sizes_of(const nf4_tensor &tensor) {
  nf4_sizes sizes{};
  sizes.struct_size = sizeof sizes;
  REQUIRE(nf4_tensor_sizes(&tensor, &sizes) == NF4_STATUS_OK);
  return sizes;
}

}  // namespace

TEST_CASE("no elements, no pointers", "[api]") {
  for (const int nested_blocksize : {0, 256}) {
    for (const auto &[rows, cols] :
         {std::pair<int64_t, int64_t>{0, 0}, {0, 5}, {7, 0}, {0, INT64_MAX}, {INT64_MAX, 0}}) {
      const nf4_tensor empty = shape(rows, cols, 64, nested_blocksize);
      CHECK(nf4_dequant_cpu(&empty, nullptr, NF4_DTYPE_FP16, 0) == NF4_STATUS_OK);
      CHECK(nf4_dequant_launch(&empty, nullptr, NF4_DTYPE_FP16, nullptr) == NF4_STATUS_OK);
      CHECK(nf4_quantize_cpu(nullptr, NF4_DTYPE_BF16, &empty, nullptr, 0, 0) == NF4_STATUS_OK);
      CHECK(nf4_quantize_launch(nullptr, NF4_DTYPE_BF16, &empty, nullptr, 0, nullptr) ==
            NF4_STATUS_OK);
      const nf4_sizes sizes = sizes_of(empty);
      CHECK(sizes.elements + sizes.blocks + sizes.nested_blocks == 0);
      CHECK(sizes.packed_bytes + sizes.absmax_bytes == 0);
    }
  }
}

TEST_CASE("no elements do not excuse a wrong argument", "[api]") {
  nf4_tensor empty = shape(0, 0, 64, 0);
  CHECK(nf4_dequant_launch(&empty, nullptr, 9, nullptr) == NF4_STATUS_INVALID_ARGUMENT);
  CHECK(nf4_dequant_cpu(&empty, nullptr, NF4_DTYPE_FP32, -2) == NF4_STATUS_INVALID_ARGUMENT);
  empty.blocksize = 63;
  CHECK(nf4_dequant_cpu(&empty, nullptr, NF4_DTYPE_FP32, 0) == NF4_STATUS_INVALID_ARGUMENT);
}

TEST_CASE("sizes", "[api]") {
  const nf4_sizes flat = sizes_of(shape(3, 97, 64, 0));
  CHECK(flat.elements == 291);
  CHECK(flat.blocks == 5);
  CHECK(flat.nested_blocks == 0);
  CHECK(flat.packed_bytes == 146);
  CHECK(flat.absmax_bytes == 20);
  const nf4_sizes nested = sizes_of(shape(4096, 4096, 64, 256));
  CHECK(nested.blocks == 262144);
  CHECK(nested.nested_blocks == 1024);
  CHECK(nested.absmax_bytes == 262144);
  const nf4_sizes large = sizes_of(shape(3, int64_t{1} << 40, 32, 1));
  CHECK(large.elements == int64_t{3} << 40);
  CHECK(large.blocks == int64_t{3} << 35);
  CHECK(large.nested_blocks == int64_t{3} << 35);
  CHECK(large.packed_bytes == int64_t{3} << 39);
  const nf4_sizes largest = sizes_of(shape(1 << 30, 1 << 30, 4096, 1 << 30));
  CHECK(largest.elements == int64_t{1} << 60);
  CHECK(largest.blocks == int64_t{1} << 48);
  CHECK(largest.nested_blocks == 1 << 18);
}

TEST_CASE("sizes: bad arguments", "[api]") {
  const nf4_tensor good = shape(3, 97, 64, 2);
  nf4_sizes sizes{};
  sizes.struct_size = sizeof sizes - 8;
  CHECK(nf4_tensor_sizes(&good, &sizes) == NF4_STATUS_INVALID_ARGUMENT);
  CHECK(std::string(nf4_last_error()).find("nf4_sizes.struct_size") != std::string::npos);
  CHECK(sizes.elements == 0);
  CHECK(nf4_tensor_sizes(&good, nullptr) == NF4_STATUS_INVALID_ARGUMENT);
  CHECK(nf4_tensor_sizes(nullptr, &sizes) == NF4_STATUS_INVALID_ARGUMENT);
  CHECK(nf4_quantize_workspace_size(&good, nullptr) == NF4_STATUS_INVALID_ARGUMENT);
  size_t bytes = 77;
  CHECK(nf4_quantize_workspace_size(nullptr, &bytes) == NF4_STATUS_INVALID_ARGUMENT);
  CHECK(bytes == 77);
  const nf4_tensor flat = shape(3, 97, 64, 0);
  CHECK(nf4_quantize_workspace_size(&flat, &bytes) == NF4_STATUS_OK);
  CHECK(bytes == 0);
  CHECK(nf4_quantize_workspace_size(&good, &bytes) == NF4_STATUS_OK);
  CHECK(bytes >= 5 * sizeof(float));
}
