// Arguments that only the batched matmul functions have: the count, the arrays, which product a
// failure is of, and products that overlap.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "nf4/nf4.h"
#include "support/call.hpp"
#include "support/catch.hpp"
#include "support/guarded.hpp"

using namespace nf4::test;

namespace {

// Two right products, to be made wrong. They share nothing.
struct TwoProducts {
  Call calls[2] = {Call(kFlat), Call(kNested)};
  nf4_tensor weights[2] = {calls[0].tensor, calls[1].tensor};
  nf4_matmul_args args[2] = {calls[0].args, calls[1].args};
  size_t count = 2;

  static constexpr int kForms[] = {kAll};
  static const std::vector<Function<TwoProducts>> &functions();

  explicit TwoProducts(int = kAll) {}
  bool untouched() const { return calls[0].untouched() && calls[1].untouched(); }
};

struct BatchFunction {
  const char *name;
  bool launches;
  nf4_status (*call)(const nf4_tensor *const *weights, const nf4_matmul_args *args, size_t count);
};
const BatchFunction kBatchFunctions[] = {
    {"nf4_matmul_batch_cpu", false,
     [](auto weights, auto args, size_t count) {
       return nf4_matmul_batch_cpu(weights, args, count, 1);
     }},
    {"nf4_matmul_batch_launch", true,
     [](auto weights, auto args, size_t count) {
       return nf4_matmul_batch_launch(weights, args, count, nullptr, 0, nullptr);
     }},
};

nf4_status multiply(const BatchFunction &function, const TwoProducts &products) {
  const nf4_tensor *const weights[] = {&products.weights[0], &products.weights[1]};
  return function.call(weights, products.args, products.count);
}

// The y of both as columns of one matrix of two rows, side by side.
void place_side_by_side(TwoProducts &products) {
  for (int i = 0; i < 2; ++i) {
    products.args[i].y = moved(products.calls[0].y_buffer.data(), i * 2 * Call::kRows);
    products.args[i].y_stride = 2 * Call::kRows;
  }
}

const std::vector<Function<TwoProducts>> &TwoProducts::functions() {
  static const std::vector<Function<TwoProducts>> list = {
      {"nf4_matmul_batch_cpu", kCpu,
       [](TwoProducts &p) { return multiply(kBatchFunctions[0], p); }},
      {"nf4_matmul_batch_launch", kLaunch,
       [](TwoProducts &p) { return multiply(kBatchFunctions[1], p); }},
  };
  return list;
}

const std::vector<Fault<TwoProducts>> kFaults = {
    {kAll, [](TwoProducts &p) { p.count = NF4_MATMUL_BATCH_MAX + 1; },
     "count is 65; expected at most 64"},
    {kAll, [](TwoProducts &p) { p.count = SIZE_MAX; },
     "count is 18446744073709551615; expected at most 64"},
    {kAll, [](TwoProducts &p) { p.args[0].m = -1; }, "product 0: m is -1; expected 0 or more"},
    {kAll, [](TwoProducts &p) { p.weights[1].blocksize = 65; },
     "product 1: blocksize is 65; expected a power of two from 32 to 4096"},
    {kAll, [](TwoProducts &p) { p.args[1].x = p.args[1].y; }, "product 1: x overlaps y"},
    {kAll, [](TwoProducts &p) { p.args[1].y = p.args[0].y; },
     "y of product 0 overlaps y of product 1"},
    // The last element of a y.
    {kAll,
     [](TwoProducts &p) {
       p.args[1].y = moved(p.calls[0].y_buffer.data(), Call::kM * Call::kRows * 2 - 2);
     },
     "y of product 0 overlaps y of product 1"},
    {kAll, [](TwoProducts &p) { p.args[1].x = p.args[0].y; },
     "y of product 0 overlaps x of product 1"},
    {kAll, [](TwoProducts &p) { p.args[0].x = p.args[1].y; },
     "y of product 1 overlaps x of product 0"},
    {kAll, [](TwoProducts &p) { p.args[0].bias = p.args[1].y; },
     "y of product 1 overlaps bias of product 0"},
    {kAll,
     [](TwoProducts &p) {
       p.weights[1].packed = moved(p.calls[0].y_buffer.data(), Call::kM * Call::kRows * 2 - 1);
     },
     "y of product 0 overlaps packed of product 1"},
    {kAll, [](TwoProducts &p) { p.args[0].y = p.calls[1].nested_code.data() + 1000; },
     "y of product 0 overlaps nested_code of product 1"},
    // Side by side, but the first reaches into the second.
    {kAll,
     [](TwoProducts &p) {
       place_side_by_side(p);
       p.args[1].y = moved(p.args[1].y, -2);
     },
     "y of product 0 overlaps y of product 1"},
    // Side by side, but the second reaches into the first.
    {kAll,
     [](TwoProducts &p) {
       place_side_by_side(p);
       p.args[1].y = moved(p.args[1].y, 2);
     },
     "y of product 0 overlaps y of product 1"},
    // Side by side, but of other strides.
    {kAll,
     [](TwoProducts &p) {
       place_side_by_side(p);
       p.args[1].y_stride += 1;
     },
     "y of product 0 overlaps y of product 1"},
};

}  // namespace

TEST_CASE("a bad batch of matmuls is named, and nothing is written", "[api]") {
  check_faults(kFaults);
}

TEST_CASE("the batches that the table breaks are right", "[api]") {
  const std::function<void(TwoProducts &)> changes[] = {
      [](TwoProducts &) {},
      place_side_by_side,
      [](TwoProducts &p) {
        place_side_by_side(p);
        std::swap(p.args[0].y, p.args[1].y);
      },
      // x, bias and the weight may be shared; y may lie against each other.
      [](TwoProducts &p) {
        p.args[1] = p.args[0];
        p.args[1].y = p.calls[1].y_buffer.data();
        p.weights[1] = p.weights[0];
      },
      // A product that is empty has no y to overlap.
      [](TwoProducts &p) {
        p.args[1].y = p.args[0].y;
        p.args[1].m = 0;
      },
  };
  for (const auto &change : changes)
    for (const BatchFunction &function : kBatchFunctions) {
      TwoProducts products;
      products.args[0].bias = products.args[1].bias = nullptr;
      change(products);
      const nf4_status status = multiply(function, products);
      CHECK((status == NF4_STATUS_OK) == !function.launches);
      CHECK(products.untouched() == function.launches);
    }
}

TEST_CASE("an overlap is found wherever it is among many products", "[api]") {
  constexpr int kCount = NF4_MATMUL_BATCH_MAX;
  constexpr int64_t kY = Call::kM * Call::kRows, kPlace = kY + Call::kRows;
  const Call call(kFlat);
  std::vector<uint16_t> memory(kCount * kPlace);
  const nf4_tensor *weights[kCount];
  nf4_matmul_args args[kCount];
  // In no order of memory; behind each y is room for a bias.
  for (int i = 0; i < kCount; ++i) {
    weights[i] = &call.tensor;
    args[i] = call.args;
    args[i].bias = nullptr;
    args[i].y = memory.data() + (i * 37 + 5) % kCount * kPlace;
  }
  const auto multiply = [&] { return nf4_matmul_batch_cpu(weights, args, kCount, 1); };
  REQUIRE(multiply() == NF4_STATUS_OK);
  for (int i = 0; i < kCount; ++i) {
    const nf4_matmul_args right = args[i];
    const int other = (i + 11) % kCount;
    auto *const others_y = static_cast<uint16_t *>(args[other].y);
    args[i].y = others_y;
    CHECK(multiply() == NF4_STATUS_INVALID_ARGUMENT);
    CHECK(nf4_last_error() == "y of product " + std::to_string(std::min(i, other)) +
                                  " overlaps y of product " + std::to_string(std::max(i, other)));
    args[i] = right;
    args[i].bias = others_y + kY;
    CHECK(multiply() == NF4_STATUS_OK);
    args[i].bias = others_y + kY - 1;
    CHECK(multiply() == NF4_STATUS_INVALID_ARGUMENT);
    CHECK(nf4_last_error() == "y of product " + std::to_string(other) +
                                  " overlaps bias of product " + std::to_string(i));
    if (others_y != memory.data()) {
      args[i].bias = others_y - Call::kRows + 1;
      CHECK(multiply() == NF4_STATUS_INVALID_ARGUMENT);
    }
    args[i] = right;
  }
}

TEST_CASE("no products are no work", "[api]") {
  for (const BatchFunction &function : kBatchFunctions) {
    INFO(function.name);
    CHECK(function.call(nullptr, nullptr, 0) == NF4_STATUS_OK);
    TwoProducts products;
    products.args[0].m = products.args[1].m = 0;
    CHECK(multiply(function, products) == NF4_STATUS_OK);
    CHECK(products.untouched());
  }
  size_t bytes = SIZE_MAX;
  CHECK(nf4_matmul_batch_workspace_size(nullptr, nullptr, 0, &bytes) == NF4_STATUS_OK);
  CHECK(bytes == 0);
}

TEST_CASE("arrays of products that are missing are named", "[api]") {
  const TwoProducts products;
  const nf4_tensor *const weights[] = {&products.weights[0], &products.weights[1]};
  for (const BatchFunction &function : kBatchFunctions) {
    CHECK(function.call(nullptr, products.args, 2) == NF4_STATUS_INVALID_ARGUMENT);
    CHECK(nf4_last_error() == std::string("the array of nf4_tensor is NULL"));
    CHECK(function.call(weights, nullptr, 2) == NF4_STATUS_INVALID_ARGUMENT);
    CHECK(nf4_last_error() == std::string("the array of nf4_matmul_args is NULL"));
  }
}

// The elements of a caller that knows a longer struct are further apart than this library knows:
// it refuses the first one and looks at no other.
TEST_CASE("of args whose first struct_size is wrong no other is read", "[api]") {
  const TwoProducts products;
  const nf4_tensor *const weights[] = {&products.weights[0], &products.weights[1]};
  const GuardedBuffer one(sizeof(nf4_matmul_args), Edge::kEnd, 0);
  nf4_matmul_args first = products.args[0];
  for (const size_t size : {size_t{0}, sizeof first + 8, SIZE_MAX}) {
    first.struct_size = size;
    std::memcpy(one.data(), &first, sizeof first);
    const auto *args = reinterpret_cast<const nf4_matmul_args *>(one.data());
    const std::string detail =
        "product 0: nf4_matmul_args.struct_size is " + std::to_string(size) + ";";
    for (const BatchFunction &function : kBatchFunctions) {
      CHECK(function.call(weights, args, 2) == NF4_STATUS_INVALID_ARGUMENT);
      CHECK(std::string(nf4_last_error()).find(detail) == 0);
    }
    size_t bytes = 0;
    CHECK(nf4_matmul_batch_workspace_size(weights, args, 2, &bytes) == NF4_STATUS_INVALID_ARGUMENT);
  }
}

// A library that knew one size of args alone would read a lora where there is none.
TEST_CASE("the args of a batch have one struct_size", "[api]") {
  const TwoProducts products;
  const nf4_tensor *const weights[] = {&products.weights[0], &products.weights[1]};
  constexpr size_t kWithout = offsetof(nf4_matmul_args, lora), kWith = sizeof(nf4_matmul_args);
  for (const auto &[first, second] : {std::pair{kWithout, kWith}, std::pair{kWith, kWithout}}) {
    const GuardedBuffer two(first + second, Edge::kEnd, 0);
    for (int i = 0; i < 2; ++i) {
      nf4_matmul_args each = products.args[i];
      each.struct_size = i == 0 ? first : second;
      std::memcpy(two.data() + i * first, &each, each.struct_size);
    }
    const auto *args = reinterpret_cast<const nf4_matmul_args *>(two.data());
    const std::string detail = "product 1: nf4_matmul_args.struct_size is " +
                               std::to_string(second) + "; expected that of product 0, " +
                               std::to_string(first);
    for (const BatchFunction &function : kBatchFunctions) {
      INFO(function.name);
      CHECK(function.call(weights, args, 2) == NF4_STATUS_INVALID_ARGUMENT);
      CHECK(nf4_last_error() == detail);
    }
    size_t bytes = 0;
    CHECK(nf4_matmul_batch_workspace_size(weights, args, 2, &bytes) == NF4_STATUS_INVALID_ARGUMENT);
    CHECK(products.untouched());
  }
}

TEST_CASE("the workspace of a batch needs no pointer but the structs' own", "[api]") {
  TwoProducts products;
  for (int i = 0; i < 2; ++i) {
    products.weights[i].packed = nullptr;
    products.weights[i].absmax = nullptr;
    products.args[i].x = nullptr;
    products.args[i].y = nullptr;
  }
  const nf4_tensor *const weights[] = {&products.weights[0], &products.weights[1]};
  size_t bytes = SIZE_MAX;
  CHECK(nf4_matmul_batch_workspace_size(weights, products.args, 2, &bytes) == NF4_STATUS_OK);
  CHECK(bytes != SIZE_MAX);
  CHECK(nf4_matmul_batch_workspace_size(weights, products.args, 2, nullptr) ==
        NF4_STATUS_INVALID_ARGUMENT);
  CHECK(std::string(nf4_last_error()).find("bytes is NULL") != std::string::npos);
  products.args[1].x_stride = Call::kCols - 1;
  CHECK(nf4_matmul_batch_workspace_size(weights, products.args, 2, &bytes) ==
        NF4_STATUS_INVALID_ARGUMENT);
  CHECK(nf4_last_error() == std::string("product 1: x_stride is 96; expected at least 97"));
}

TEST_CASE("a plan needs no pointer but the structs' own", "[api]") {
  TwoProducts products;
  for (int i = 0; i < 2; ++i) {
    products.weights[i].packed = nullptr;
    products.weights[i].absmax = nullptr;
    products.args[i].x = nullptr;
    products.args[i].y = nullptr;
    products.args[i].dtype = NF4_DTYPE_BF16;
  }
  const nf4_tensor *const weights[] = {&products.weights[0], &products.weights[1]};
  int32_t launches[2] = {7, 7};
  const char *kernels[2] = {};
  const auto plan = [&](int32_t device) {
    return nf4_matmul_plan(weights, products.args, 2, device, launches, kernels);
  };
  const auto refused = [&](const char *detail) {
    return plan(0) == NF4_STATUS_INVALID_ARGUMENT && nf4_last_error() == std::string(detail);
  };
  nf4_device info{};
  info.struct_size = sizeof info;
  const nf4_status usable = nf4_device_info(0, &info);
  CHECK(plan(0) == usable);
  if (usable == NF4_STATUS_OK) {
    CHECK(launches[0] == 0);
    CHECK(kernels[0] != nullptr);
    CHECK(plan(-1) == NF4_STATUS_INVALID_ARGUMENT);
    CHECK(plan(info.device_count) == NF4_STATUS_INVALID_ARGUMENT);
    products.args[1].m = 0;
    CHECK(plan(0) == NF4_STATUS_OK);
    CHECK(launches[1] == -1);
    CHECK(kernels[1] == nullptr);
  }
  CHECK(nf4_matmul_plan(weights, products.args, 2, 0, nullptr, kernels) ==
        NF4_STATUS_INVALID_ARGUMENT);
  CHECK(nf4_last_error() == std::string("launches is NULL"));
  CHECK(nf4_matmul_plan(weights, products.args, 2, 0, launches, nullptr) ==
        NF4_STATUS_INVALID_ARGUMENT);
  CHECK(nf4_last_error() == std::string("kernels is NULL"));
  products.args[1].dtype = NF4_DTYPE_FP32;
  products.args[1].m = 17;
  CHECK(refused(
      "product 1: dtype is 1 (fp32) and m is 17; expected m of at most 16, or dtype 2 (fp16) "
      "or 3 (bf16), on a GPU"));
  products.args[1].m = 16;
  CHECK(plan(0) == usable);
  products.args[1].dtype = NF4_DTYPE_BF16;
  products.args[1].m = 1;
  products.args[1].x_stride = Call::kCols - 1;
  CHECK(refused("product 1: x_stride is 96; expected at least 97"));
}
