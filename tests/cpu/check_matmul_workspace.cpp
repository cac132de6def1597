// The size of matmul's workspace is part of what callers rely on: buffers sized once, graphs. So
// the sizes of 100,000 random products are held by a hash, and a few by name.
#include <algorithm>
#include <cstdint>
#include <random>

#include "cuda/matmul/workspace.hpp"
#include "nf4/nf4.h"
#include "support/catch.hpp"
#include "support/choice_table.hpp"

using namespace nf4;

namespace {

size_t workspace_bytes(int64_t rows, int64_t cols, int64_t m, nf4_dtype dtype, int32_t blocksize,
                       decltype(&nf4_matmul_workspace_size) function = nf4_matmul_workspace_size) {
  nf4_tensor weight{};
  weight.struct_size = sizeof weight;
  weight.format = NF4_FORMAT_NF4;
  weight.blocksize = blocksize;
  weight.rows = rows;
  weight.cols = cols;
  nf4_matmul_args args{};
  args.struct_size = sizeof args;
  args.dtype = dtype;
  args.m = m;
  args.x_stride = args.y_stride = std::max(rows, cols);
  size_t bytes = 1;
  REQUIRE(function(&weight, &args, &bytes) == NF4_STATUS_OK);
  return bytes;
}

}  // namespace

TEST_CASE("the workspace of matmul keeps its sizes", "[matmul]") {
  // The multistage kernels need most where 192 CTAs share tiles, the wgmma kernels in small
  // weights.
  constexpr size_t kFlags = 192 * 16 * 8, kTile = 128 * 256 * 4;
  CHECK(workspace_bytes(14336, 4096, 8, NF4_DTYPE_BF16, 64) == 0);
  CHECK(workspace_bytes(14336, 4096, 9, NF4_DTYPE_BF16, 64) == kFlags + 192 * 16 * 256 * 4);
  CHECK(workspace_bytes(14336, 4096, 64, NF4_DTYPE_BF16, 64) == kFlags + 192 * 64 * 256 * 4);
  CHECK(workspace_bytes(14336, 4096, 128, NF4_DTYPE_BF16, 64) == kFlags + 192 * kTile);
  CHECK(workspace_bytes(14336, 4096, 300, NF4_DTYPE_FP16, 64) == kFlags + 192 * kTile);
  CHECK(workspace_bytes(14336, 4096, 4096, NF4_DTYPE_FP16, 64) == kFlags + 192 * kTile);
  CHECK(workspace_bytes(256, 4096, 300, NF4_DTYPE_FP16, 64) == 144 * 16 * 8 + 32 * 272 * 128 * 4);
  CHECK(workspace_bytes(14336, 4096, 300, NF4_DTYPE_FP16, 32) == 0);
  CHECK(workspace_bytes(14336, 4096, 300, NF4_DTYPE_FP32, 64) == 0);

  std::mt19937_64 engine(17);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(engine() % uint64_t(n)); };
  uint64_t hash = 0xcbf29ce484222325;
  for (int i = 0; i < 100000; ++i) {
    const int64_t rows = below(int64_t{1} << (1 + below(30)));
    const int64_t cols = below(int64_t{1} << (1 + below(14))) * (below(8) == 0 ? 1 : 64);
    const int64_t m = below(int64_t{1} << (1 + below(20)));
    const auto dtype = static_cast<nf4_dtype>(NF4_DTYPE_FP32 + below(3));
    const auto blocksize = static_cast<int32_t>(32 << below(8));
    hash = (hash ^ workspace_bytes(rows, cols, m, dtype, blocksize)) * 0x100000001b3;
  }
  CHECK(hash == test::kWorkspaceSizes);
}

TEST_CASE("the workspace of the gradient has room for multistage kernels", "[matmul]") {
  constexpr size_t kFlags = 192 * 16 * 8;
  const auto bytes = [](int64_t rows, int64_t cols, int64_t m, nf4_dtype dtype = NF4_DTYPE_BF16) {
    return workspace_bytes(rows, cols, m, dtype, 64, nf4_matmul_grad_workspace_size);
  };
  // Up to 16 rows of dY the stream-K tiles of wgmma need more.
  CHECK(bytes(14336, 4096, 1) == kFlags + 144 * 64 * 128 * 4);
  CHECK(bytes(14336, 4096, 64) == kFlags + 192 * 64 * 256 * 4);
  CHECK(bytes(14336, 4096, 4096) == kFlags + 192 * 128 * 256 * 4);
  CHECK(bytes(14336, 4100, 64) == 0);
  CHECK(bytes(14336, 4096, 64, NF4_DTYPE_FP32) == 0);
}

TEST_CASE("the workspace of matmul does not shrink as m grows", "[matmul]") {
  std::mt19937_64 engine(18);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(engine() % uint64_t(n)); };
  for (int i = 0; i < 100000; ++i) {
    cuda::MatmulSize size{};
    size.dtype = NF4_DTYPE_BF16;
    size.m = below(int64_t{1} << (1 + below(12)));
    size.rows = below(int64_t{1} << (1 + below(16)));
    size.cols = 64 * below(int64_t{1} << (1 + below(9)));
    size.scale_columns = 64;
    size.kind = static_cast<cuda::WeightKind>(below(3));
    INFO("kind " << static_cast<int>(size.kind) << ", " << size.rows << " x " << size.cols << ", m "
                 << size.m);
    const int64_t bytes = cuda::MatmulWorkspace(size).bytes();
    size.m += below(size.m + 1);
    REQUIRE(cuda::MatmulWorkspace(size).bytes() >= bytes);
  }
}

TEST_CASE("a weight without elements needs no workspace, however large its sizes", "[matmul]") {
  for (const int64_t rows : {int64_t{0}, INT64_MAX - 4})
    for (const int64_t cols : {int64_t{0}, INT64_MAX - 4}) {
      if (rows != 0 && cols != 0) continue;
      for (const nf4_dtype dtype : {NF4_DTYPE_FP32, NF4_DTYPE_BF16})
        CHECK(workspace_bytes(rows, cols, 0, dtype, 64) == 0);
      CHECK(workspace_bytes(rows, cols, 0, NF4_DTYPE_BF16, 64, nf4_matmul_grad_workspace_size) ==
            0);
    }
}
