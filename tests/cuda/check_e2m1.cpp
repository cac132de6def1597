// Every CUDA kernel of MXFP4 and NVFP4 products that this GPU runs against the product in binary64.
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "cuda/matmul/matmul.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/families.hpp"
#include "support/launches.hpp"
#include "support/matmul_cases.hpp"
#include "support/matmul_placed.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

bool has_kernel(const cuda::GpuFamily &family, int config, nf4_dtype dtype) {
  if (!cuda::has_kernel(cuda::WeightKind::kE2m1, config)) return false;
  return cuda::matmul_has(family, config, compute_capability()) &&
         (cuda::is_mma(config) || family.tensor_cores || dtype == NF4_DTYPE_FP16);
}

// Each kernel that this GPU has, of these configurations, was met so often.
void check_counts(const MatmulCounts &counts, int least, nf4_dtype dtype, ConfigRange configs) {
  for (const cuda::GpuFamily *family : runnable_families())
    for (int config = configs.first; config < configs.end; ++config) {
      INFO("family " << family->name << ", " << cuda::kMatmulConfigs[config].name);
      if (has_kernel(*family, config, dtype))
        CHECK((counts.count(family) != 0 ? counts.at(family)[config] : 0) >= least);
    }
}

constexpr ConfigRange kNoStreamK{cuda::kMma64x64, cuda::kFirstStreamK};

}  // namespace

TEST_CASE("every kernel multiplies MXFP4 and NVFP4", "[cuda][matmul][e2m1][random]") {
  constexpr XKind kKinds[] = {XKind::kOrdinary, XKind::kOutliers, XKind::kNotFinite};
  constexpr int64_t kRowsOfX[] = {1, 2, 7, 8, 16, 17, 40, 70, 130, 310};
  const Stream stream;
  uint64_t number = 0x21000000;
  for (const nf4_dtype dtype : kDtypes16) {
    MatmulCounts counts;
    for (const CaseClass &kind : byte_classes(dtype))
      for (const int64_t m : kRowsOfX)
        for (int i = 0; i < 3 * shapes_or(6); ++i) {
          Rng rng(++number);
          const int64_t step = rng.one_in(4) ? kind.blocksize : 64;
          const int64_t cols = rng.between(1, rng.one_in(4) ? 60 : 12) * step;
          const MatmulShape shape{rng.between(1, 600000 / (cols * m) + 2), cols, m};
          MatmulCase test =
              random_matmul_case(rng, kind, CodebookKind::kNf4, shape, rng.pick(kKinds));
          INFO(describe(test, number));
          check_matmul(test, rng, stream, counts);
        }
    check_counts(counts, few_shapes() ? 1 : 10, dtype, kNoStreamK);
  }
}

TEST_CASE("every kernel multiplies MXFP4 and NVFP4 of many rows or columns",
          "[cuda][matmul][e2m1]") {
  const Stream stream;
  uint64_t number = 0x21400000;
  for (const nf4_dtype dtype : kDtypes16) {
    MatmulCounts counts;
    for (const CaseClass &kind : byte_classes(dtype))
      for (const MatmulShape shape :
           {MatmulShape{13000, 64, 9}, MatmulShape{4300, 320, 2}, MatmulShape{200, 8960, 2},
            MatmulShape{140, 8192, 8}, MatmulShape{135, 12288, 16}, MatmulShape{130, 2880, 2},
            MatmulShape{140, 2880, 16}, MatmulShape{130, 1536, 17}, MatmulShape{130, 2880, 70},
            MatmulShape{70, 512, 160}, MatmulShape{200, 960, 310}}) {
        Rng rng(++number);
        if (few_shapes() && number % 3 != 0) continue;
        MatmulCase test = plain_matmul_case(rng, kind, shape);
        INFO(describe(test, number));
        check_matmul(test, rng, stream, counts, Judged::kEachAndAll);
      }
    check_counts(counts, few_shapes() ? 1 : 4, dtype, kNoStreamK);
  }
}

TEST_CASE("stream-K kernels share the tiles of MXFP4 and NVFP4", "[cuda][matmul][e2m1]") {
  const int ctas = multiprocessors();
  const Stream stream;
  uint64_t number = 0x21800000;
  const struct {
    int64_t n_tiles, k_tiles, m_tiles;
  } sizes[] = {{ctas / 3 + 1, 16, 1}, {ctas / 2 + 3, 4, 3}, {ctas / 4 - 1, 18, 1}};
  for (int config = cuda::kFirstStreamK; config < cuda::kMatmulConfigCount; ++config)
    for (const nf4_dtype dtype : kDtypes16)
      for (const auto &[n_tiles, k_tiles, m_tiles] : sizes) {
        if (!cuda::has_kernel(cuda::WeightKind::kE2m1, config)) continue;
        Rng rng(++number);
        if (few_shapes() && number % 3 != 0) continue;
        const cuda::MatmulConfig &tile = cuda::kMatmulConfigs[config];
        const MatmulShape size{n_tiles * tile.tile_n - rng.between(0, 100),
                               k_tiles * 128 - (rng.one_in(4) ? 64 : 0), tile.tile_m * m_tiles - 3};
        MatmulCase test = plain_matmul_case(rng, byte_classes(dtype)[number % 3], size);
        repeat_rows(test, rng, 8);
        INFO(describe(test, number));
        MatmulCounts counts;
        check_matmul(test, rng, stream, counts, Judged::kEachAndAll, {config, config + 1});
        check_counts(counts, 1, dtype, {config, config + 1});
      }
}

TEST_CASE("the gradient of MXFP4 and NVFP4, and products in fp32", "[cuda][matmul][e2m1]") {
  const Stream stream;
  MatmulCounts counts;
  uint64_t number = 0x21c00000;
  for (const nf4_dtype dtype : kDtypes)
    for (const CaseClass &kind : byte_classes(dtype))
      for (const MatmulShape shape :
           {MatmulShape{130, 320, 3, true}, MatmulShape{64, 1024, 20, true},
            MatmulShape{300, 96, 70, true}, MatmulShape{130, 320, 3}, MatmulShape{77, 2880, 16}}) {
        Rng rng(++number);
        MatmulCase test = plain_matmul_case(rng, kind, shape);
        INFO(describe(test, number));
        check_matmul(test, rng, stream, counts, Judged::kEachAndAll);
      }
}

// Scales above 2^17 are beyond fp16 even where weights are not: y is right, or infinite.
TEST_CASE("large scales of MXFP4 in fp16 give no finite number that is wrong",
          "[cuda][matmul][e2m1]") {
  const Stream stream;
  constexpr int64_t kCols = 64;
  constexpr uint16_t kInfinity = 0x7c00;
  for (const int64_t rows : {int64_t{40}, int64_t{64} * multiprocessors() + 16})
    for (const int64_t m : {1, 2, 3, 9, 40})
      for (const int byte : {143, 144, 145, 150}) {
        INFO(rows << " rows, m " << m << ", scale 2^" << byte - 127);
        const DeviceBuffer packed(rows * kCols / 2), absmax(rows * kCols / 32);
        DeviceBuffer x(m * kCols * 2);
        fill_bytes(packed.data(), 0x11, packed.size());  // 0.5
        fill_bytes(absmax.data(), static_cast<uint8_t>(byte), absmax.size());
        x.write(std::vector<uint16_t>(m * kCols, 0x0100).data());  // 2^-16
        const DeviceBuffer y(m * rows * 2), workspace(size_t{32} << 20);
        nf4_tensor weight{};
        weight.struct_size = sizeof weight;
        weight.format = NF4_FORMAT_MXFP4;
        weight.blocksize = 32;
        weight.rows = rows;
        weight.cols = kCols;
        weight.packed = packed.data();
        weight.absmax = absmax.data();
        nf4_matmul_args args{};
        args.struct_size = sizeof args;
        args.dtype = NF4_DTYPE_FP16;
        args.m = m;
        args.x = x.data();
        args.x_stride = kCols;
        args.y = y.data();
        args.y_stride = rows;
        fill_bytes(workspace.data(), 0, workspace.size());
        REQUIRE(nf4_matmul_launch(&weight, &args, workspace.data(), workspace.size(), stream) ==
                NF4_STATUS_OK);
        stream.synchronize();
        const std::vector<uint8_t> read = y.read();
        const auto *numbers = reinterpret_cast<const uint16_t *>(read.data());
        // 64 products of 2^-17: the sum is 2^(byte - 138).
        const auto right = static_cast<uint16_t>((byte - 138 + 15) << 10);
        CHECK(std::all_of(numbers, numbers + m * rows, [&](uint16_t number) {
          return number == right || (byte > 143 && number == kInfinity);
        }));
      }
}
