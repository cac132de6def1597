// Calls with an adapter (LoRA): graphs, batches, inputs that a predecessor writes late.
#include <cuda_runtime.h>

#include <deque>
#include <vector>

#include "support/adapter.hpp"
#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/launches.hpp"
#include "support/matmul_cases.hpp"
#include "support/matmul_placed.hpp"

using namespace nf4;
using namespace nf4::test;

TEST_CASE("a product with an adapter gives the same bits 100 times from a graph",
          "[cuda][matmul][lora][long]") {
  const Stream stream;
  for (const MatmulShape &shape :
       {MatmulShape{300, 2048, 1}, MatmulShape{300, 2048, 40},
        MatmulShape{rows_to_split(), 2304, 150}, MatmulShape{2048, 320, 2, true},
        MatmulShape{2048, rows_to_share(), 300, true}}) {
    Rng rng(0xbd00000 + shape.m);
    const MatmulCase test = plain_matmul_case(rng, {NF4_DTYPE_BF16, 64, true}, shape);
    const HostAdapter adapter = random_adapter(rng, test, NF4_DTYPE_BF16, 16, false);
    const PlacedMatmul placed(rng, test, true);
    const PlacedAdapter with(rng, test, adapter, placed, true, true);
    INFO("m " << shape.m << (shape.gradient ? ", gradient" : ""));
    check_replays({bytes_of("y", placed.y), bytes_of("product", with.product)}, stream,
                  [&] { return with.multiply(placed, stream); });
  }
}

// The second has none.
TEST_CASE("a batch with adapters gives the bits of its products", "[cuda][matmul][lora]") {
  const Stream stream;
  for (const int64_t m : {1, 16, 100}) {
    INFO("m " << m);
    Rng rng(0xbe00000 + m);
    std::deque<PlacedMatmul> placed;
    std::deque<PlacedAdapter> with;
    std::vector<const nf4_tensor *> weights;
    std::vector<nf4_matmul_args> args;
    std::vector<std::vector<uint8_t>> y, product;
    const auto clear = [&](int i) {
      fill_bytes(placed[i].y.data(), 0xa5, placed[i].y.size());
      fill_bytes(with[i].product.data(), 0xa5, with[i].product.size());
    };
    for (int i = 0; i < 3; ++i) {
      const MatmulCase test =
          plain_matmul_case(rng, {NF4_DTYPE_BF16, 64, true}, {130 + 8 * i, 1536, m});
      const HostAdapter adapter = random_adapter(rng, test, NF4_DTYPE_BF16, 8 << i, false);
      placed.emplace_back(rng, test, true);
      with.emplace_back(rng, test, adapter, placed[i], true, true);
      weights.push_back(&placed[i].weight.tensor());
      args.push_back(with[i].args);
      if (i == 1) args[i].lora = nullptr;
      clear(i);
      REQUIRE(nf4_matmul_launch(weights[i], &args[i], with[i].workspace.data(),
                                with[i].workspace.size(), stream) == NF4_STATUS_OK);
      stream.synchronize();
      y.push_back(placed[i].y.read());
      product.push_back(with[i].product.read());
      clear(i);
    }
    size_t bytes = 0;
    REQUIRE(nf4_matmul_batch_workspace_size(weights.data(), args.data(), 3, &bytes) ==
            NF4_STATUS_OK);
    const DeviceBuffer workspace(bytes);
    REQUIRE(nf4_matmul_batch_launch(weights.data(), args.data(), 3, workspace.data(), bytes,
                                    stream) == NF4_STATUS_OK);
    stream.synchronize();
    for (int i = 0; i < 3; ++i) {
      CHECK(same_bytes(placed[i].y.read(), y[i]));
      CHECK(same_bytes(with[i].product.read(), product[i]));
    }
  }
}

// Whose product's kernel and the base product's start early.
TEST_CASE("a product with an adapter waits for what a predecessor writes late",
          "[cuda][matmul][lora][long]") {
  const Stream stream;
  uint64_t number = 0xbb00000;
  for (const MatmulShape &shape :
       {MatmulShape{300, 2048, 1}, MatmulShape{300, 2048, 16}, MatmulShape{300, 2048, 40},
        MatmulShape{300, 2048, 300}, MatmulShape{2048, 320, 1, true},
        MatmulShape{2048, 320, 70, true}}) {
    Rng rng(++number);
    MatmulCase test = plain_matmul_case(rng, {NF4_DTYPE_BF16, 64, true}, shape);
    for (const nf4_dtype dtype : {NF4_DTYPE_BF16, NF4_DTYPE_FP32}) {
      const HostAdapter adapter = random_adapter(rng, test, dtype, 16, false);
      const PlacedMatmul placed(rng, test, true);
      const PlacedAdapter with(rng, test, adapter, placed, true, true);
      INFO("m " << shape.m << (shape.gradient ? ", gradient" : ""));
      std::vector<DeviceBytes> inputs = parts_of(test.weight, placed.weight.tensor());
      for (const DeviceBytes &input :
           {bytes_of("x", placed.x), bytes_of("a", with.a), bytes_of("b", with.b),
            bytes_of("workspace", with.workspace)})
        inputs.push_back(input);
      check_waits(inputs, {bytes_of("y", placed.y), bytes_of("product", with.product)}, stream,
                  [&] { return with.multiply(placed, stream); });
    }
  }
}
