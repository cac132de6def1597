// The gradient's skinny kernels, up to 16 rows of dY, against the product in binary64.
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

constexpr ConfigRange kSkinny{cuda::kSkinny8, cuda::kSkinny16 + 1};

bool has_skinny() {
  return cuda::matmul_grad_has(*runnable_families()[0], cuda::kSkinny8, compute_capability());
}

// Each was met so often, on the best family, if it has them.
void check_counts(const MatmulCounts &counts, int least) {
  if (!has_skinny()) return;
  const auto found = counts.find(runnable_families()[0]);
  for (int config = kSkinny.first; config < kSkinny.end; ++config) {
    INFO(cuda::kMatmulConfigs[config].name);
    CHECK((found != counts.end() ? found->second[config] : 0) >= least);
  }
}

}  // namespace

TEST_CASE("skinny gradient kernels multiply within the rounding of their factors",
          "[cuda][matmul_grad][random]") {
  constexpr XKind kKinds[] = {XKind::kOrdinary, XKind::kOutliers, XKind::kNotFinite};
  const int shapes = shapes_or(20);
  const Stream stream;
  MatmulCounts counts;
  uint64_t number = 0x18000000;
  for (const nf4_dtype dtype : kDtypes16)
    for (const bool nested : {false, true})
      for (int i = 0; i < shapes; ++i) {
        Rng rng(++number);
        const MatmulShape shape{rng.between(1, 900), rng.between(1, 3) * 256,
                                rng.between(1, rng.one_in(2) ? 8 : 16), true};
        MatmulCase test = random_matmul_case(rng, {dtype, 64, nested},
                                             codebook_kind(static_cast<int>(rng.between(0, 1))),
                                             shape, rng.pick(kKinds));
        INFO(describe(test, number));
        check_matmul(test, rng, stream, counts, Judged::kEach, kSkinny);
      }
  check_counts(counts, few_shapes() ? 1 : shapes / 2);
}

// One strip in a cluster, with parts that have no K-tile; several of a cluster's warps with several
// K-tiles; more strips than clusters are for.
TEST_CASE("skinny gradient kernels have the error of dense products", "[cuda][matmul_grad]") {
  const Stream stream;
  MatmulCounts counts;
  constexpr MatmulShape kShapes[] = {
      {70, 256, 1, true},    {65, 256, 16, true},   {1999, 256, 7, true}, {6000, 512, 3, true},
      {3000, 1280, 9, true}, {300, 14336, 2, true}, {20, 34048, 16, true}};
  uint64_t number = 0x18400000;
  for (const nf4_dtype dtype : kDtypes16)
    for (const bool nested : {false, true})
      for (const MatmulShape &shape : kShapes) {
        Rng rng(++number);
        if (few_shapes() && number % 4 != 0) continue;
        MatmulCase test = plain_matmul_case(rng, {dtype, 64, nested}, shape);
        INFO(describe(test, number));
        check_matmul(test, rng, stream, counts, Judged::kEachAndAll, kSkinny);
      }
  check_counts(counts, few_shapes() ? 1 : 8);
}

TEST_CASE("skinny gradient kernels run where they can, and give the same bits 100 times",
          "[cuda][matmul_grad][long]") {
  const Stream stream;
  for (const MatmulShape shape :
       {MatmulShape{1000, 512, 8, true}, MatmulShape{2100, 1024, 13, true}}) {
    Rng rng(0x18800000 + shape.m);
    const MatmulCase test = plain_matmul_case(rng, {NF4_DTYPE_BF16, 64, true}, shape);
    const PlacedMatmul placed(rng, test, true);
    if (has_skinny()) CHECK(placed.used(test) == (shape.m > 8 ? cuda::kSkinny16 : cuda::kSkinny8));
    check_replays({bytes_of("y", placed.y)}, stream, [&] { return placed.multiply(test, stream); });
  }
}

TEST_CASE("a skinny gradient waits for what a predecessor writes late",
          "[cuda][matmul_grad][long]") {
  const Stream stream;
  uint64_t number = 0x18c00000;
  for (const int64_t m : {3, 16})
    for (const bool nested : {false, true}) {
      Rng rng(++number);
      const MatmulCase test =
          plain_matmul_case(rng, {NF4_DTYPE_BF16, 64, nested}, {2048, 512, m, true});
      const PlacedMatmul placed(rng, test, true);
      std::vector<DeviceBytes> inputs = parts_of(test.weight, placed.weight.tensor());
      inputs.push_back(bytes_of("x", placed.x));
      INFO("m " << m << (nested ? ", nested" : ", flat"));
      check_waits(inputs, {bytes_of("y", placed.y)}, stream,
                  [&] { return placed.multiply(test, stream); });
    }
}
