// Gradients of an adapter's matrices on a GPU, by the kernels of every family that it runs, against
// naive sums in binary64.
#include <cuda_runtime.h>

#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/families.hpp"
#include "support/launches.hpp"
#include "support/lora_grad_case.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

constexpr int kShapes = 40;  // per dtype

// The matrices of a case in device memory.
class Placed {
 public:
  Placed(Rng &rng, LoraGradCase &test, bool aligned = false)
      : test_(test),
        matrices_{&test.x, &test.dy, &test.p, &test.q, &test.da, &test.db},
        args_(test.args()) {
    for (Matrix *matrix : matrices_) {
      buffers_.emplace_back(matrix->buffer.size(),
                            aligned ? 0 : random_lead(rng, dtype_bytes(matrix->dtype)));
      buffers_.back().write(matrix->buffer.data());
    }
    args_.x = buffers_[0].data();
    args_.dy = buffers_[1].data();
    args_.p = buffers_[2].data();
    args_.q = buffers_[3].data();
    args_.da = buffers_[4].data();
    args_.db = buffers_[5].data();
  }
  const nf4_lora_grad_args &args() const { return args_; }
  std::vector<DeviceBytes> inputs() const {
    return {bytes_of("x", buffers_[0]), bytes_of("dy", buffers_[1]), bytes_of("p", buffers_[2]),
            bytes_of("q", buffers_[3])};
  }
  std::vector<DeviceBytes> outputs() const {
    return {bytes_of("da", buffers_[4]), bytes_of("db", buffers_[5])};
  }
  // Into the case.
  nf4_status run(const nf4_lora_grad_args &args, const Stream &stream) const {
    for (int i = 4; i < 6; ++i) fill_bytes(buffers_[i].data(), 0xa5, buffers_[i].size());
    const nf4_status status = nf4_lora_grad_launch(&args, stream);
    stream.synchronize();
    for (int i = 4; i < 6; ++i)
      std::memcpy(matrices_[i]->buffer.data(), buffers_[i].read().data(), buffers_[i].size());
    return status;
  }
  nf4_status run(const Stream &stream) const { return run(args_, stream); }
  bool surroundings_intact() const {
    for (const DeviceBuffer &buffer : buffers_)
      if (!buffer.lead_intact()) return false;
    return test_.surroundings_intact();
  }

 private:
  const LoraGradCase &test_;
  std::array<Matrix *, 6> matrices_;
  std::vector<DeviceBuffer> buffers_;
  nf4_lora_grad_args args_;
};

// Whose rows vectors of 16 bytes can load.
LoraGradCase vector_case(Rng &rng, nf4_dtype dtype, nf4_dtype grad_dtype,
                         const LoraGradShape &shape) {
  for (;;) {
    LoraGradCase test(rng, dtype, grad_dtype, shape);
    if (test.x.stride % 8 == 0 && test.dy.stride % 8 == 0) return test;
  }
}

void check(Rng &rng, LoraGradCase &test, const Stream &stream, bool aligned) {
  const ExpectedLoraGrad expected(test);
  const Placed placed(rng, test, aligned);
  for (const cuda::GpuFamily *family : runnable_families()) {
    INFO(family->name);
    const ForcedFamily forced(family);
    REQUIRE(placed.run(stream) == NF4_STATUS_OK);
    expected.check(test);
    CHECK(placed.surroundings_intact());
  }
}

}  // namespace

TEST_CASE("every family's gradients of an adapter are within the rounding of their sums",
          "[cuda][lora][random]") {
  const Stream stream;
  uint64_t number = 0x29000000;
  for (const nf4_dtype dtype : kDtypes)
    for (int i = 0; i < shapes_or(kShapes); ++i) {
      Rng rng(++number);
      LoraGradCase test(rng, dtype, random_grad_dtype(rng, dtype), random_lora_grad_shape(rng));
      INFO(describe(test, number));
      check(rng, test, stream, rng.one_in(2));
    }
}

TEST_CASE("gradients of an adapter by vectors: few rows, a pipeline's laps, chunks of ranks, tails",
          "[cuda][lora]") {
  const Stream stream;
  uint64_t number = 0x29400000;
  for (const nf4_dtype dtype : {NF4_DTYPE_FP16, NF4_DTYPE_BF16})
    for (const LoraGradShape &shape :
         {LoraGradShape{1, 64, 8, 8}, LoraGradShape{17, 72, 136, 16}, LoraGradShape{129, 8, 64, 24},
          LoraGradShape{511, 200, 64, 64}, LoraGradShape{900, 64, 72, 16},
          LoraGradShape{640, 128, 40, 128}, LoraGradShape{300, 136, 64, 4}}) {
      Rng rng(++number);
      LoraGradCase test = vector_case(rng, dtype, random_grad_dtype(rng, dtype), shape);
      INFO(describe(test, number));
      check(rng, test, stream, true);
    }
}

TEST_CASE("gradients of an adapter of many rows", "[cuda][lora][long]") {
  const Stream stream;
  uint64_t number = 0x29800000;
  for (const nf4_dtype dtype : kDtypes)
    for (const int rank : {16, 33}) {
      Rng rng(++number);
      LoraGradCase test(rng, dtype, NF4_DTYPE_FP32, {9001, 130, 70, rank});
      INFO(describe(test, number));
      check(rng, test, stream, true);
    }
}

TEST_CASE("gradients of an adapter give the same bits 100 times from a graph",
          "[cuda][lora][long]") {
  const Stream stream;
  uint64_t number = 0x29c00000;
  for (const LoraGradShape &shape :
       {LoraGradShape{300, 1100, 2050, 16}, LoraGradShape{1, 4096, 4096, 64}}) {
    Rng rng(++number);
    LoraGradCase test(rng, NF4_DTYPE_BF16, NF4_DTYPE_FP32, shape);
    INFO(describe(test, number));
    const Placed placed(rng, test, true);
    check_replays(placed.outputs(), stream,
                  [&] { return nf4_lora_grad_launch(&placed.args(), stream); });
  }
}

TEST_CASE("gradients of an adapter wait for what a predecessor writes late", "[cuda][lora][long]") {
  const Stream stream;
  uint64_t number = 0x2a000000;
  for (const int rank : {16, 40}) {
    Rng rng(++number);
    LoraGradCase test(rng, NF4_DTYPE_BF16, NF4_DTYPE_BF16, {300, 512, 512, rank});
    INFO(describe(test, number));
    const Placed placed(rng, test, true);
    check_waits(placed.inputs(), placed.outputs(), stream,
                [&] { return nf4_lora_grad_launch(&placed.args(), stream); });
  }
}

TEST_CASE("on a GPU a number that is not finite affects its column, or its rank", "[cuda][lora]") {
  constexpr int kRank = 9;
  const Stream stream;
  Rng rng(0x2a400000);
  for (const nf4_dtype dtype : kDtypes)
    for (const float bad : {NAN, INFINITY}) {
      LoraGradCase test(rng, dtype, dtype, {51, 70, 333, kRank});
      test.x.set(50, 332, bad);
      test.q.set(3, 8, bad);
      test.dy.set(17, 0, bad);
      test.p.set(50, 0, bad);
      INFO("dtype " << dtype << ", " << bad);
      REQUIRE(Placed(rng, test).run(stream) == NF4_STATUS_OK);
      for (int64_t r = 0; r < kRank; ++r) {
        for (int64_t k = 0; k < 333; ++k)
          CHECK(std::isfinite(test.da(r, k)) == (k != 332 && r != 8));
        for (int64_t n = 0; n < 70; ++n) CHECK(std::isfinite(test.db(n, r)) == (n != 0 && r != 0));
      }
    }
}

TEST_CASE("on a GPU without rows of x an adapter's gradients are 0, and one may be left out",
          "[cuda][lora]") {
  const Stream stream;
  Rng rng(0x2a800000);
  for (const nf4_dtype dtype : kDtypes) {
    INFO("dtype " << dtype);
    LoraGradCase empty(rng, dtype, NF4_DTYPE_FP32, {0, 37, 300, 5});
    const Placed of_nothing(rng, empty);
    nf4_lora_grad_args args = of_nothing.args();
    args.x = args.dy = args.p = args.q = nullptr;
    REQUIRE(of_nothing.run(args, stream) == NF4_STATUS_OK);
    for (int64_t r = 0; r < 5; ++r) {
      for (int64_t k = 0; k < 300; ++k) CHECK(empty.da(r, k) == 0);
      for (int64_t n = 0; n < 37; ++n) CHECK(empty.db(n, r) == 0);
    }
    CHECK(of_nothing.surroundings_intact());

    LoraGradCase test(rng, dtype, dtype, {12, 40, 70, 3});
    const ExpectedLoraGrad expected(test);
    const Placed placed(rng, test);
    args = placed.args();
    args.da = nullptr;
    args.x = args.q = nullptr;
    REQUIRE(placed.run(args, stream) == NF4_STATUS_OK);
    CHECK(test.da.buffer.untouched());
    expected.check_db(test);
    args = placed.args();
    args.db = nullptr;
    args.dy = args.p = nullptr;
    REQUIRE(placed.run(args, stream) == NF4_STATUS_OK);
    CHECK(test.db.buffer.untouched());
    expected.check_da(test);
  }
}
