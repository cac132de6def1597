// x in the order of a reordered weight's columns: the bits of y are those of the weight without a
// permutation and of x in that order.
#include <cuda_runtime.h>

#include <cstring>
#include <vector>

#include "cuda/matmul/matmul.hpp"
#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/families.hpp"
#include "support/int4_matmul.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

using Case = Int4MatmulCase;

// The same product without a permutation.
Case in_order(const Case &test) {
  Case plain = test;
  plain.weight.bytes[kInt4Permutation].clear();
  const int64_t cols = test.weight.shape.cols;
  plain.x_stride = (cols + 7) / 8 * 8;
  plain.x.assign(((test.m - 1) * plain.x_stride + cols) * 2, 0);
  const auto *const columns =
      reinterpret_cast<const int32_t *>(test.weight.bytes[kInt4Permutation].data());
  for (int64_t m = 0; m < test.m; ++m)
    for (int64_t k = 0; k < cols; ++k)
      std::memcpy(plain.x.data() + (m * plain.x_stride + k) * 2,
                  test.x.data() + (m * test.x_stride + columns[k]) * 2, 2);
  return plain;
}

std::vector<uint8_t> product(Rng &rng, const Case &test, const Stream &stream) {
  const PlacedInt4Matmul placed(rng, test, true);
  REQUIRE(placed.multiply(test, stream) == NF4_STATUS_OK);
  stream.synchronize();
  return placed.y.read();
}

// Rows of x that vectors can load, or not.
Case random_case(Rng &rng, int64_t m, int64_t cols, bool vectors) {
  const Int4Class kind{NF4_INT4_COMPRESSED_TENSORS, rng.pick(kDtypes16), false, 0,
                       ColumnOrder::kPermutation};
  const Int4Shape shape{rng.between(1, 40), cols, -1};
  Case test;
  do
    test =
        random_int4_matmul_case(rng, kind, shape, rng.pick(kDtypes16), m, XKind::kOrdinary, true);
  while ((test.x_stride % 8 == 0) != vectors);
  return test;
}

}  // namespace

TEST_CASE("columns of x are permuted: parts of rows, several rows a CTA, tails",
          "[cuda][matmul][int4][permute]") {
  const int64_t ctas = 2 * device_attribute(cudaDevAttrMultiProcessorCount);
  const struct {
    int64_t m, cols;
    bool vectors;
  } sizes[] = {{1, 8, true},           {3, 4096, true},          // a row in parts
               {9, 12376, true},                                 // the last part is shorter
               {ctas / 3, 2600, true}, {3 * ctas, 12000, true},  // in parts, and several rows a CTA
               {2, 38000, true},  // with 227 KiB of shared memory three stages, and one
               {2, 39000, true},       {6 * ctas + 5, 96, true},  // all stages, twice
               {ctas + 1, 4104, true}, {1, 2600, false},         {5, 2600, false}, {3, 515, false}};
  const Stream stream;
  uint64_t number = 0x1bd00000;
  for (const cuda::GpuFamily *family : runnable_families())
    for (const auto &[m, cols, vectors] : sizes) {
      Rng rng(++number);
      const ForcedFamily forced(family);
      const Case test = random_case(rng, m, cols, vectors);
      INFO(family->name << ", " << describe(test, number));
      CHECK(same_bytes(product(rng, test, stream), product(rng, in_order(test), stream)));
    }
}
