// Every CUDA matmul kernel that this GPU runs against the product in binary64, on random
// shapes, strides, tails, alignments, blocksizes and tables.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <iterator>
#include <map>
#include <string>
#include <thread>
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

// Per dtype and flat or nested.
int shapes() { return 8 * shapes_or(30); }

// Shapes of which most are those of the skinny or of the wgmma kernels.
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

// A family whose tensor cores multiply fp16 alone has skinny and multistage kernels of fp16.
bool has_kernel(const cuda::GpuFamily &family, int config, nf4_dtype dtype) {
  return cuda::matmul_has(family, config, compute_capability()) &&
         (cuda::is_mma(config) || family.tensor_cores || dtype == NF4_DTYPE_FP16);
}

// Each kernel that this GPU has, of these configurations, was met so often. The stream-K kernels,
// the last, are for weights that are large for the GPU.
void check_counts(const MatmulCounts &counts, int least,
                  ConfigRange configs = {cuda::kMma64x64, cuda::kFirstStreamK},
                  nf4_dtype dtype = NF4_DTYPE_FP16) {
  for (const cuda::GpuFamily *family : runnable_families())
    for (int config = configs.first; config < configs.end; ++config) {
      INFO("family " << family->name << ", " << cuda::kMatmulConfigs[config].name);
      if (!has_kernel(*family, config, dtype) || (cuda::is_skinny(config) && !fits_skinny(dtype)))
        continue;
      // A kernel without bf16 runs half of the cases.
      const int wanted = has_kernel(*family, config, NF4_DTYPE_BF16) ? least : (least + 1) / 2;
      CHECK((counts.count(family) != 0 ? counts.at(family)[config] : 0) >= wanted);
    }
}

// With a codebook of the caller's, and rows of x that vectors can load.
MatmulCase sorted_case(Rng &rng, const CaseClass &kind, const MatmulShape &shape) {
  MatmulCase test;
  do test = random_matmul_case(rng, kind, CodebookKind::kSorted, shape, XKind::kOrdinary);
  while (test.x_stride % 8 != 0);
  return test;
}

// A case that is aligned, in memory and in its columns, is not kMma64x64's where there are others.
void check_not_mma(const PlacedMatmul &placed, const MatmulCase &test) {
  const auto has = [&](int config) {
    return has_kernel(*runnable_families()[0], config, test.dtype);
  };
  const bool fp32 = test.dtype == NF4_DTYPE_FP32;
  if (test.m <= 16 && fits_skinny(test.dtype) ? has(cuda::kSkinny2)
                                              : !fp32 && has(cuda::kFirstMultistage))
    CHECK(placed.used(test) != cuda::kMma64x64);
}

bool can_share() {
  return cuda::matmul_has(*runnable_families()[0], cuda::kFirstStreamK, compute_capability());
}
// So they do where the library chooses.
void check_shared(const PlacedMatmul &placed, const MatmulCase &test) {
  if (can_share() && test.weight.shape.rows == rows_to_share() - 5)
    CHECK(placed.used(test) >= cuda::kFirstStreamK);
}

}  // namespace

TEST_CASE("every kernel multiplies within the rounding of its factors", "[cuda][matmul][random]") {
  constexpr XKind kKinds[] = {XKind::kOrdinary, XKind::kOutliers, XKind::kNotFinite};
  const Stream stream;
  MatmulCounts counts;
  uint64_t number = 0xb000000;
  for (const nf4_dtype dtype : kDtypes16)
    for (const bool nested : {false, true})
      for (int i = 0; i < shapes(); ++i) {
        Rng rng(++number);
        const CaseClass kind{dtype, rng.pick(kBlocksizes), nested};
        MatmulCase test = random_matmul_case(rng, kind, random_codebook_kind(rng),
                                             random_shape_for_gpu(rng), rng.pick(kKinds));
        INFO(describe(test, number));
        check_matmul(test, rng, stream, counts);
      }
  check_counts(counts, few_shapes() ? 1 : shapes() / 4);
}

// Scales that are loaded by vectors, as those of blocks of 64 are; columns that clusters split;
// tiles that are nearly empty, and nearly full.
TEST_CASE("every kernel multiplies blocks of 64 in rows of many blocks", "[cuda][matmul]") {
  const Stream stream;
  MatmulCounts counts;
  constexpr MatmulShape kShapes[] = {{130, 1536, 2},  {140, 3072, 9}, {130, 1536, 17},
                                     {130, 3072, 70}, {70, 512, 160}, {200, 1024, 310}};
  uint64_t number = 0xb400000;
  for (int kind = 0; kind < 4; ++kind)
    for (int i = 0; i < static_cast<int>(std::size(kShapes)); ++i) {
      Rng rng(++number);
      if (few_shapes() && i % 4 != kind) continue;
      MatmulCase test =
          plain_matmul_case(rng, {kDtypes16[kind / 2], 64, kind % 2 == 1}, kShapes[i]);
      INFO(describe(test, number));
      check_matmul(test, rng, stream, counts, Judged::kEachAndAll);
    }
  check_counts(counts, few_shapes() ? 1 : 4);
}

// fp32, of up to 16 rows of x.
TEST_CASE("every kernel multiplies fp32 within the rounding of fp32", "[cuda][matmul][random]") {
  constexpr XKind kKinds[] = {XKind::kOrdinary, XKind::kOutliers, XKind::kNotFinite};
  const Stream stream;
  MatmulCounts counts;
  uint64_t number = 0xb600000;
  for (const bool nested : {false, true})
    for (int i = 0; i < shapes(); ++i) {
      Rng rng(++number);
      const CaseClass kind{NF4_DTYPE_FP32, rng.pick(kBlocksizes), nested};
      MatmulShape shape = random_shape_for_gpu(rng);
      shape.m = std::min<int64_t>(shape.m, kFp32RowsOfX);
      MatmulCase test =
          random_matmul_case(rng, kind, random_codebook_kind(rng), shape, rng.pick(kKinds));
      INFO(describe(test, number));
      check_matmul(test, rng, stream, counts);
    }
  check_counts(counts, few_shapes() ? 1 : shapes() / 4, {cuda::kMma64x64, cuda::kMma64x64 + 1},
               NF4_DTYPE_FP32);
  check_counts(counts, few_shapes() ? 1 : shapes() / 4, {cuda::kSkinny8, cuda::kSkinny16 + 1},
               NF4_DTYPE_FP32);
}

// x far from 1, whose powers of two differ from row to row.
TEST_CASE("fp32 has the error of fp32 as a whole", "[cuda][matmul]") {
  const Stream stream;
  MatmulCounts counts;
  uint64_t number = 0xb700000;
  for (const bool nested : {false, true})
    for (const MatmulShape shape :
         {MatmulShape{130, 1536, 1}, MatmulShape{70, 512, 16}, MatmulShape{140, 8192, 8},
          MatmulShape{135, 12288, 16}, MatmulShape{13000, 64, 9}, MatmulShape{60, 4160, 13}}) {
      Rng rng(++number);
      if (few_shapes() && number % 5 != 4) continue;  // one, several and many rows; nested and not
      MatmulCase test = plain_matmul_case(rng, {NF4_DTYPE_FP32, 64, nested}, shape);
      for (int64_t row = 0; row < shape.m; ++row)
        for (int64_t k = 0; k < shape.cols; ++k) {
          auto *const x = reinterpret_cast<float *>(test.x.data()) + row * test.x_stride + k;
          *x = std::ldexp(*x, static_cast<int>(row * 12) - 90);
        }
      test.bias.clear();
      INFO(describe(test, number));
      check_matmul(test, rng, stream, counts, Judged::kEachAndAll);
    }
  check_counts(counts, few_shapes() ? 1 : 2, {cuda::kSkinny2, cuda::kSkinny16 + 1}, NF4_DTYPE_FP32);
}

// Shapes in which a CTA's rows or columns take more than one pass.
TEST_CASE("every kernel multiplies weights of many rows or columns", "[cuda][matmul][long]") {
  const Stream stream;
  MatmulCounts counts;
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
  check_counts(counts, 2, {cuda::kMma64x64, cuda::kFirstStreamK}, NF4_DTYPE_BF16);
}

// Each with tiles that several CTAs have a part of, and with tiles that are shared beside such as
// are not. Of rows of 512 columns and more, in blocks of 64, scales come by vectors; CTAs begin and
// end in the middle of those.
TEST_CASE("stream-K kernels share the tiles that do not fill the GPU", "[cuda][matmul]") {
  const int ctas = multiprocessors();
  const Stream stream;
  uint64_t number = 0xf000000;
  const struct {
    int64_t n_tiles, k_tiles, m_tiles;
  } sizes[] = {{ctas / 3 + 1, 16, 1},
               {2 * ctas + 3, 4, 1},
               {ctas / 2 + 3, 4, 3},
               {ctas / 4 - 1, 18, 1},  // split-K
               {ctas / 16, 35, 2}};
  for (int config = cuda::kFirstStreamK; config < cuda::kMatmulConfigCount; ++config)
    for (const nf4_dtype dtype : kDtypes16)
      for (const auto &[n_tiles, k_tiles, m_tiles] : sizes) {
        if (!cuda::has_kernel(cuda::WeightKind::kCodebook, config)) continue;
        Rng rng(++number);
        if ((few_shapes() || k_tiles > 16) && number % 2 != 0) continue;  // each size once
        const CaseClass kind{dtype, rng.one_in(4) ? 256 : 64, rng.one_in(2)};
        // Where x has several tiles, some of y's are whole and most are stored by vectors.
        const int64_t missing = m_tiles > 1 ? rng.between(0, 12) * 8 : rng.between(0, 100);
        const MatmulShape size{n_tiles * cuda::kMatmulConfigs[config].tile_n - missing,
                               k_tiles * 128 - (rng.one_in(4) ? 64 : 0),
                               cuda::kMatmulConfigs[config].tile_m * m_tiles - 3};
        MatmulCase test = plain_matmul_case(rng, kind, size);
        repeat_rows(test, rng, 8);
        INFO(describe(test, number));
        MatmulCounts counts;
        check_matmul(test, rng, stream, counts, Judged::kEachAndAll, {config, config + 1});
        check_counts(counts, 1, {config, config + 1}, test.dtype);
      }
}

// Launches that follow one another share a workspace, in which the one's flags lie among the
// other's sums; the next may begin before the last has ended.
TEST_CASE("matmuls in a stream share a workspace", "[cuda][matmul][long]") {
  constexpr int kLaunches = 60;
  const Stream stream;
  const CaseClass kind{NF4_DTYPE_BF16, 64, true};
  Rng rng(0xf800000);
  struct Product {
    int config;
    MatmulCase test;
  };
  std::vector<Product> products;
  const auto add = [&](const char *name, const MatmulShape &shape) {
    products.push_back({cuda::config_named(name), plain_matmul_case(rng, kind, shape)});
  };
  if (can_share()) {
    add("wgmma_304x128_stream_k", {rows_to_share() - 5, 4096, 300});
    add("wgmma_128x128_stream_k", {rows_to_share() - 5, 1024, 100});
    add("wgmma_152x128_stream_k", {rows_to_split(), 2304, 150});
    add("wgmma_16x256_stream_k", {rows_to_split(), 2304, 13});
  } else if (has_kernel(*runnable_families()[0], cuda::config_named("multistage_128x256"),
                        kind.dtype)) {
    add("multistage_128x256", {rows_to_share() - 5, 4096, 300});
    add("multistage_64x256", {rows_to_split(), 2304, 60});
    add("multistage_32x256", {rows_to_split(), 2304, 30});
    add("multistage_16x256", {rows_to_split(), 2304, 13});
  } else {
    return;
  }
  const int count = static_cast<int>(products.size());
  std::vector<PlacedMatmul> placed;
  std::vector<std::vector<uint8_t>> expected;
  for (const auto &[config, test] : products) {
    const ForcedMatmul forced(runnable_families()[0], config);
    placed.emplace_back(rng, test, true);
    REQUIRE(placed.back().used(test) == config);
    REQUIRE(placed.back().multiply(test, stream) == NF4_STATUS_OK);
    stream.synchronize();
    expected.push_back(placed.back().y.read());
  }
  for (int i = 1; i < count; ++i)
    REQUIRE(placed[0].workspace.size() > placed[i].workspace.size() + (1 << 20));
  std::vector<DeviceBuffer> y;
  for (int i = 0; i < kLaunches; ++i) y.emplace_back(placed[i % count].y.size());
  for (int i = 0; i < kLaunches; ++i) {
    const auto &[config, test] = products[i % count];
    const PlacedMatmul &product = placed[i % count];
    const ForcedMatmul forced(runnable_families()[0], config);
    nf4_matmul_args args = product.args(test);
    args.y = y[i].data();
    // The others' flags lie where the first's sums do.
    const size_t begin = i % count == 0 ? 0 : 1 << 20;
    REQUIRE(nf4_matmul_launch(&product.weight.tensor(), &args,
                              placed[0].workspace.data<uint8_t>() + begin,
                              placed[0].workspace.size() - begin, stream) == NF4_STATUS_OK);
  }
  stream.synchronize();
  for (int i = 0; i < kLaunches; ++i) {
    INFO("launch " << i);
    CHECK(same_bytes(y[i].read(), expected[i % count]));
  }
}

// The CTAs of the others wait for the end of those that run, so that none may wait for them.
TEST_CASE("stream-K kernels end on few multiprocessors", "[cuda][matmul]") {
  const Stream stream, other;
  Rng rng(0xf900000);
  for (const char *const name :
       {"wgmma_16x256_stream_k", "wgmma_32x256_stream_k", "wgmma_64x128_stream_k",
        "wgmma_128x128_stream_k", "wgmma_208x128_stream_k", "wgmma_256x128_stream_k",
        "multistage_16x256", "multistage_32x256", "multistage_64x256", "multistage_128x256"}) {
    const int config = cuda::config_named(name);
    if (!cuda::matmul_has(*runnable_families()[0], config, compute_capability())) continue;
    const ForcedMatmul forced(runnable_families()[0], config);
    const MatmulCase test =
        plain_matmul_case(rng, {NF4_DTYPE_FP16, 64, true},
                          {rows_to_split(), 2304, cuda::kMatmulConfigs[config].tile_m - 3});
    INFO(describe(test, 0) << ", " << name);
    const PlacedMatmul placed(rng, test, true);
    REQUIRE(placed.used(test) == config);
    check_replays({bytes_of("y", placed.y)}, stream, [&] { return placed.multiply(test, stream); });
  }
}

// In a process of its own, as the first use of CUDA: kernels are loaded, and get their shared
// memory, while capturing.
TEST_CASE("matmuls that nothing has warmed up are captured", "[.cold]") {
  Rng rng(0xda00000);
  const CaseClass kind{NF4_DTYPE_BF16, 64, true};
  const MatmulCase few = plain_matmul_case(rng, kind, {300, 1024, 1});
  const MatmulCase many = plain_matmul_case(rng, kind, {300, 1024, 64});
  const PlacedMatmul placed_few(rng, few, true), placed_many(rng, many, true);
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
  check_not_mma(placed_few, few);
  check_not_mma(placed_many, many);
  REQUIRE_CUDA(cudaGraphExecDestroy(graph));
}

TEST_CASE("a matmul waits for what a predecessor writes late", "[cuda][matmul][long]") {
  const Stream stream;
  uint64_t number = 0xd800000;
  for (const MatmulShape shape :
       {MatmulShape{300, 2048, 1}, MatmulShape{300, 2048, 8}, MatmulShape{300, 2048, 16},
        MatmulShape{300, 2048, 40}, MatmulShape{300, 2048, 70}, MatmulShape{300, 2048, 130},
        MatmulShape{300, 2048, 200}, MatmulShape{300, 2048, 300},
        MatmulShape{rows_to_share() - 5, 4096, 300}})
    for (const CaseClass &kind :
         {CaseClass{NF4_DTYPE_BF16, 64, true}, CaseClass{NF4_DTYPE_FP16, 64, false},
          CaseClass{NF4_DTYPE_FP32, 64, true}, CaseClass{NF4_DTYPE_FP32, 64, false}}) {
      if (kind.dtype == NF4_DTYPE_FP32 && shape.m > kFp32RowsOfX) continue;
      Rng rng(++number);
      MatmulCase test =
          kind.nested ? plain_matmul_case(rng, kind, shape) : sorted_case(rng, kind, shape);
      test.bias.assign(shape.rows * dtype_bytes(kind.dtype), 0x3c);
      const PlacedMatmul placed(rng, test, true);
      check_not_mma(placed, test);
      check_shared(placed, test);
      std::vector<DeviceBytes> inputs = parts_of(test.weight, placed.weight.tensor());
      inputs.push_back(bytes_of("x", placed.x));
      inputs.push_back(bytes_of("bias", placed.bias));
      inputs.push_back(bytes_of("workspace", placed.workspace));
      INFO("m " << shape.m);
      check_waits(inputs, {bytes_of("y", placed.y)}, stream,
                  [&] { return placed.multiply(test, stream); });
    }
}
