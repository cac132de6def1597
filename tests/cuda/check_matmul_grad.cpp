// Every CUDA kernel of the gradient, dX = dY W, that this GPU runs against the product in binary64,
// on random shapes, strides, tails, alignments, blocksizes and tables.
#include <cuda_runtime.h>

#include <utility>
#include <vector>

#include "cuda/matmul/matmul.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/families.hpp"
#include "support/force_matmul.hpp"
#include "support/launches.hpp"
#include "support/matmul_cases.hpp"
#include "support/matmul_placed.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

constexpr MatmulShape gradient(int64_t rows, int64_t cols, int64_t m) {
  return {rows, cols, m, true};
}

// Half of them such as the wgmma kernels take, if they are aligned, and half of those such as the
// multistage kernels take.
MatmulShape random_gradient(Rng &rng) {
  MatmulShape shape = random_matmul_shape(rng);
  shape.gradient = true;
  std::swap(shape.rows, shape.cols);
  if (rng.one_in(2)) return shape;
  shape.cols = rng.between(1, 6) * 64;
  shape.m = rng.between(1, rng.one_in(4) ? 400 : 150);
  const int64_t step = rng.one_in(2) ? 64 : 8;
  shape.rows = rng.between(1, 600000 / (shape.cols * shape.m * step) + 1) * step;
  return shape;
}

constexpr ConfigRange kMultistage{cuda::kFirstMultistage, cuda::kMatmulConfigCount};

bool has(int config) {
  return cuda::matmul_grad_has(*runnable_families()[0], config, compute_capability());
}

// Each kernel that this GPU has, of these configurations, was met so often. The wgmma kernels of
// stream-K are for weights that are large for the GPU; skinny ones are in
// check_matmul_grad_skinny.cpp.
void check_counts(const MatmulCounts &counts, int least,
                  ConfigRange configs = {cuda::kMma64x64, cuda::kFirstStreamK}) {
  for (const cuda::GpuFamily *family : runnable_families())
    for (int config = configs.first; config < configs.end; ++config) {
      INFO("family " << family->name << ", " << cuda::kMatmulConfigs[config].name);
      if (!cuda::is_skinny(config) && cuda::matmul_grad_has(*family, config, compute_capability()))
        CHECK((counts.count(family) != 0 ? counts.at(family)[config] : 0) >= least);
    }
}

}  // namespace

TEST_CASE("every gradient kernel multiplies within the rounding of its factors",
          "[cuda][matmul_grad][random]") {
  constexpr XKind kKinds[] = {XKind::kOrdinary, XKind::kOutliers, XKind::kNotFinite};
  const int shapes = 4 * shapes_or(20);
  const Stream stream;
  MatmulCounts counts;
  uint64_t number = 0x17000000;
  for (const nf4_dtype dtype : kDtypes)
    for (const bool nested : {false, true})
      for (int i = 0; i < shapes; ++i) {
        Rng rng(++number);
        const CaseClass kind{dtype, rng.pick(kBlocksizes), nested};
        MatmulCase test = random_matmul_case(rng, kind, random_codebook_kind(rng),
                                             random_gradient(rng), rng.pick(kKinds));
        INFO(describe(test, number));
        check_matmul(test, rng, stream, counts);
      }
  check_counts(counts, few_shapes() ? 1 : shapes / 8);
  check_counts(counts, few_shapes() ? 1 : shapes / 8, kMultistage);
}

// Tiles that are nearly empty, and nearly full; rows that clusters split; the last K-tile's tail.
TEST_CASE("gradient kernels have the error of dense products", "[cuda][matmul_grad]") {
  const Stream stream;
  MatmulCounts counts;
  constexpr MatmulShape kShapes[] = {gradient(1536, 192, 2),  gradient(3000, 64, 9),
                                     gradient(2049, 256, 17), gradient(3072, 128, 70),
                                     gradient(512, 320, 160), gradient(1111, 192, 310)};
  uint64_t number = 0x17400000;
  for (const nf4_dtype dtype : kDtypes)
    for (const bool nested : {false, true})
      for (const MatmulShape &shape : kShapes) {
        Rng rng(++number);
        if (few_shapes() && number % 4 != 0) continue;
        MatmulCase test = plain_matmul_case(rng, {dtype, rng.one_in(2) ? 64 : 256, nested}, shape);
        INFO(describe(test, number));
        check_matmul(test, rng, stream, counts, Judged::kEachAndAll);
      }
  check_counts(counts, few_shapes() ? 1 : 4);
  check_counts(counts, few_shapes() ? 1 : 4, kMultistage);
}

// Each with tiles that several CTAs have a part of, and with tiles that are shared beside such as
// are not.
TEST_CASE("stream-K gradient kernels share the tiles that do not fill the GPU",
          "[cuda][matmul_grad]") {
  const int ctas = multiprocessors();
  const Stream stream;
  uint64_t number = 0x17800000;
  const struct {
    int64_t tiles, k_tiles, m_tiles;
  } sizes[] = {{ctas / 3 + 1, 16, 1},
               {2 * ctas + 3, 4, 1},
               {ctas / 2 + 3, 4, 3},
               {ctas / 4 - 1, 28, 1}};  // as many CTAs each
  for (int config = cuda::kFirstStreamK; config < cuda::kMatmulConfigCount; ++config)
    for (const nf4_dtype dtype : kDtypes16)
      for (const auto &[tiles, k_tiles, m_tiles] : sizes) {
        if (!cuda::has_kernel(cuda::WeightKind::kTransposed, config)) continue;
        Rng rng(++number);
        if (few_shapes() && number % 2 != 0) continue;
        const CaseClass kind{dtype, rng.one_in(4) ? 256 : 64, rng.one_in(2)};
        // The multistage kernels take whole K-tiles, of 64 rows.
        const int64_t tail = cuda::is_multistage(config) ? 64 : rng.between(0, 100);
        const MatmulShape size =
            gradient(k_tiles * 128 - tail, tiles * 128 - 64 * rng.between(0, 1),
                     cuda::kMatmulConfigs[config].tile_m * m_tiles - 3);
        MatmulCase test = plain_matmul_case(rng, kind, size);
        repeat_rows(test, rng, 8);
        INFO(describe(test, number));
        MatmulCounts counts;
        check_matmul(test, rng, stream, counts, Judged::kEachAndAll, {config, config + 1});
        check_counts(counts, 1, {config, config + 1});
      }
}

TEST_CASE("a gradient gives the same bits 100 times, and from a graph",
          "[cuda][matmul_grad][long]") {
  const Stream stream;
  for (const MatmulShape shape :
       {gradient(1000, 320, 1), gradient(1536, 512, 16), gradient(2000, 1088, 70),
        gradient(4096, 640, 300), gradient(2048, rows_to_share(), 300)}) {
    Rng rng(0x17c00000 + shape.m);
    const MatmulCase test = plain_matmul_case(rng, {NF4_DTYPE_BF16, 64, true}, shape);
    const PlacedMatmul placed(rng, test, true);
    if (has(cuda::config_named("wgmma_128x128")) && shape.m > 16)
      CHECK(placed.used(test) != cuda::kMma64x64);
    check_replays({bytes_of("y", placed.y)}, stream, [&] { return placed.multiply(test, stream); });
  }
}

TEST_CASE("a gradient waits for what a predecessor writes late", "[cuda][matmul_grad][long]") {
  const Stream stream;
  uint64_t number = 0x17e00000;
  for (const MatmulShape shape : {gradient(2048, 320, 1), gradient(2048, 320, 16),
                                  gradient(2048, 320, 70), gradient(2048, 320, 300)})
    for (const CaseClass &kind :
         {CaseClass{NF4_DTYPE_BF16, 64, true}, CaseClass{NF4_DTYPE_FP16, 64, false},
          CaseClass{NF4_DTYPE_FP32, 64, true}}) {
      Rng rng(++number);
      const MatmulCase test = plain_matmul_case(rng, kind, shape);
      const PlacedMatmul placed(rng, test, true);
      std::vector<DeviceBytes> inputs = parts_of(test.weight, placed.weight.tensor());
      inputs.push_back(bytes_of("x", placed.x));
      inputs.push_back(bytes_of("workspace", placed.workspace));
      INFO("m " << shape.m);
      check_waits(inputs, {bytes_of("y", placed.y)}, stream,
                  [&] { return placed.multiply(test, stream); });
    }
}

// The reduction is over nothing: dX is 0.
TEST_CASE("the gradient of a weight without rows is 0", "[cuda][matmul_grad]") {
  const Stream stream;
  for (const nf4_dtype dtype : kDtypes) {
    const DeviceBuffer y(6 * 4);
    nf4_tensor weight{};
    weight.struct_size = sizeof weight;
    weight.format = NF4_FORMAT_NF4;
    weight.blocksize = 64;
    weight.nested_blocksize = 256;
    weight.cols = 2;
    nf4_matmul_args args{};
    args.struct_size = sizeof args;
    args.dtype = dtype;
    args.m = 3;
    args.y = y.data();
    args.y_stride = 2;
    REQUIRE(nf4_matmul_grad_launch(&weight, &args, nullptr, 0, stream) == NF4_STATUS_OK);
    stream.synchronize();
    const std::vector<uint8_t> got = y.read();
    for (int i = 0; i < 6 * dtype_bytes(dtype); ++i) REQUIRE(got[i] == 0);
  }
}
