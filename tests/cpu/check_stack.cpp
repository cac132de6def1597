// How much of its thread's stack a call takes.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/force.hpp"
#include "support/matmul_cases.hpp"
#include "support/placed.hpp"
#include "support/variants.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

// As nf4.h says; beside AddressSanitizer's redzones around what functions keep on the stack.
#ifdef __SANITIZE_ADDRESS__
constexpr size_t kRedzones = 16 << 10;
#else
constexpr size_t kRedzones = 0;
#endif
constexpr size_t kMost = (192 << 10) + kRedzones;
// With more than one, the calling thread keeps what it shares with the others.
constexpr int kThreads = 3;

// How much of a stack a function takes, in bytes.
template <class Function>
size_t stack_of(Function function) {
  constexpr size_t kBytes = size_t{512} << 10;
  constexpr uint8_t kPoison = 0xa5;
  const size_t page = sysconf(_SC_PAGESIZE);
  std::vector<uint8_t> memory(kBytes + page);
  uint8_t *const stack = &memory[page - reinterpret_cast<uintptr_t>(memory.data()) % page];
  std::memset(stack, kPoison, kBytes);
  pthread_attr_t attributes;
  REQUIRE(pthread_attr_init(&attributes) == 0);
  REQUIRE(pthread_attr_setstack(&attributes, stack, kBytes) == 0);
  pthread_t thread;
  const auto call = [](void *opaque) -> void * {
    (*static_cast<Function *>(opaque))();
    return nullptr;
  };
  REQUIRE(pthread_create(&thread, &attributes, call, &function) == 0);
  REQUIRE(pthread_join(thread, nullptr) == 0);
  pthread_attr_destroy(&attributes);
  // Byte by byte would take a sanitizer minutes.
  const std::vector<uint8_t> untouched(page, kPoison);
  const uint8_t *lowest = stack, *const end = stack + kBytes;
  while (lowest < end && std::memcmp(lowest, untouched.data(), page) == 0) lowest += page;
  return end - std::find_if(lowest, end, [](uint8_t byte) { return byte != kPoison; });
}

template <class Call>
void check_stack(Call call) {
  nf4_status status = -1;
  // A thread's own share, such as the thread-local variables of a CUDA build, is none of the
  // call's.
  static const size_t of_thread = stack_of([] {});
  const size_t bytes = stack_of([&] { status = call(); }) - of_thread;
  CHECK(status == NF4_STATUS_OK);
  CHECK(bytes <= kMost);
}

// x and y, of so many products of one weight.
struct Products {
  std::vector<float> x, y;
  std::vector<nf4_matmul_args> args;

  Products(size_t count, nf4_dtype dtype, int64_t rows, int64_t cols, int64_t m)
      : x(m * cols), y(count * m * rows) {
    for (size_t i = 0; i < count; ++i)
      args.push_back({sizeof(nf4_matmul_args), dtype, 0, m, x.data(), cols, nullptr,
                      &y[i * m * rows], rows, nullptr});
  }
};

// A stack of one expert that has all rows of a product. x and y are as large as each other's.
struct Grouped {
  int32_t end;
  nf4_grouped_args args{};

  explicit Grouped(const nf4_matmul_args &product) : end(static_cast<int32_t>(product.m)) {
    args.struct_size = sizeof args;
    args.dtype = product.dtype;
    args.experts = 1;
    args.m = args.x_rows = product.m;
    args.x = product.x;
    args.x_stride = product.x_stride;
    args.y = product.y;
    args.y_stride = product.y_stride;
    args.ends = &end;
  }
};

// The numbers of rows of x for a variant. The reference, which is slow, has one loop for all.
std::vector<int64_t> rows_of_x(const cpu::Variant &variant, std::vector<int64_t> all) {
  if (&variant == &scalar_variant()) all.resize(1);
  return all;
}

void check_int4_products(const nf4_int4_tensor &weight, const cpu::Variant &variant) {
  const std::vector<const nf4_int4_tensor *> weights(2, &weight);
  for (const nf4_dtype dtype : kDtypes)
    for (const int64_t m : rows_of_x(variant, {1, 4, 20, 64})) {
      INFO("dtype " << dtype << ", m " << m);
      const Products products(weights.size(), dtype, weight.rows, weight.cols, m);
      check_stack([&] { return nf4_int4_matmul_cpu(&weight, products.args.data(), kThreads); });
      const Grouped grouped(products.args[0]);
      check_stack([&] { return nf4_int4_matmul_grouped_cpu(&weight, &grouped.args, kThreads); });
      check_stack([&] {
        return nf4_int4_matmul_batch_cpu(weights.data(), products.args.data(), weights.size(),
                                         kThreads);
      });
    }
}

// A batch with adapters, one of its products, and its gradient. x and y are as large as each
// other's.
void check_adapters(const nf4_tensor &weight, std::vector<nf4_matmul_args> args) {
  const int64_t rank = 128, m = args[0].m;
  const std::vector<float> a(rank * weight.cols), b(rank * weight.rows);
  std::vector<float> product(args.size() * m * rank), dx(m * weight.cols);
  std::vector<nf4_lora> loras;
  loras.reserve(args.size());
  for (nf4_matmul_args &each : args) {
    loras.push_back({sizeof(nf4_lora), NF4_DTYPE_FP32, rank, 1, 0, a.data(), weight.cols, b.data(),
                     rank, &product[loras.size() * m * rank]});
    each.lora = &loras.back();
    // The first one's rows of x take as much stack as those of all; the time is that of one.
    if (loras.size() > 1) each.m = 1;
  }
  const std::vector<const nf4_tensor *> weights(args.size(), &weight);
  check_stack(
      [&] { return nf4_matmul_batch_cpu(weights.data(), args.data(), args.size(), kThreads); });
  check_stack([&] { return nf4_matmul_cpu(&weight, args.data(), kThreads); });
  const Grouped grouped(args[0]);
  check_stack([&] { return nf4_matmul_grouped_cpu(&weight, &grouped.args, kThreads); });
  std::vector<float> da(a.size()), db(b.size());
  const nf4_lora_grad_args of_adapter{
      sizeof of_adapter, args[0].dtype,  args[0].dtype, rank,        1,         m,
      weight.rows,       weight.cols,    args[0].x,     weight.cols, args[0].y, weight.rows,
      product.data(),    product.data(), da.data(),     weight.cols, db.data(), rank};
  check_stack([&] { return nf4_lora_grad_cpu(&of_adapter, kThreads); });
  args[0].y = dx.data();
  args[0].y_stride = weight.cols;
  check_stack([&] { return nf4_matmul_grad_cpu(&weight, args.data(), kThreads); });
  const Grouped gradient(args[0]);
  check_stack([&] { return nf4_matmul_grouped_grad_cpu(&weight, &gradient.args, kThreads); });
}

void check_reorder(HostInt4Weight host) {
  HostInt4Weight sorted = sorted_shape(host);
  const nf4_int4_tensor from = host.in_place();
  nf4_int4_tensor to = sorted.in_place();
  to.scales = from.scales;
  to.zeros = from.zeros;
  check_stack([&] { return nf4_int4_reorder_cpu(&from, &to, kThreads); });
}

}  // namespace

TEST_CASE("a call takes as much of its thread's stack as nf4.h says, and no more",
          "[threads][stack]") {
  Rng rng(14);
  const QuantizeCase dense =
      random_quantize_case(rng, {NF4_DTYPE_FP32, 64, true}, CodebookKind::kSorted, 2500001);
  const MatmulCase one = random_matmul_case(rng, {NF4_DTYPE_BF16, 32, true}, CodebookKind::kSorted,
                                            {20, 4160, 1}, XKind::kOrdinary);
  for (const cpu::Variant *variant : supported_variants()) {
    INFO("variant " << variant->name);
    const ForcedVariant forced(*variant);
    const PlacedWeight weight(rng, one.weight), quantized(rng, dense.weight);
    const std::vector<const nf4_tensor *> weights(NF4_MATMUL_BATCH_MAX, &weight.tensor());
    std::vector<uint8_t> workspace(dense.workspace_bytes);
    check_stack([&] {
      return nf4_quantize_cpu(dense.in.data(), dense.dtype, &quantized.tensor(), workspace.data(),
                              workspace.size(), kThreads);
    });
    for (const nf4_dtype dtype : kDtypes)
      for (const int64_t m : rows_of_x(*variant, {1, 20})) {
        INFO("dtype " << dtype << ", m " << m);
        const Products products(weights.size(), dtype, 20, 4160, m);
        check_stack([&] {
          return nf4_matmul_batch_cpu(weights.data(), products.args.data(), weights.size(),
                                      kThreads);
        });
        check_adapters(weight.tensor(), products.args);
      }
  }
}

TEST_CASE("so do those of integer weights", "[threads][stack]") {
  uint64_t stream = 0x1e000000;
  for (const ColumnOrder order :
       {ColumnOrder::kPlain, ColumnOrder::kGIdx, ColumnOrder::kPermutation})
    for (const nf4_int4_layout layout : kInt4Layouts)
      for (const int32_t group_size : {8, 128}) {
        Rng rng(++stream);
        const Int4Shape shape{24, 1152, group_size};
        const Int4Class kind{layout, NF4_DTYPE_FP16, true, 0, order};
        HostInt4Weight host = random_int4_weight(rng, kind, shape, true);
        const nf4_int4_tensor weight = host.in_place();
        std::vector<float> dense(host.elements());
        INFO(describe(host, stream));
        for (const cpu::Variant *variant : supported_variants()) {
          INFO("variant " << variant->name);
          const ForcedVariant forced(*variant);
          check_int4_products(weight, *variant);
          for (const nf4_dtype dtype : kDtypes) {
            check_stack(
                [&] { return nf4_int4_dequant_cpu(&weight, dense.data(), dtype, kThreads); });
            if (order == ColumnOrder::kPlain)
              check_stack(
                  [&] { return nf4_int4_quantize_cpu(dense.data(), dtype, &weight, 0, kThreads); });
          }
          if (order == ColumnOrder::kGIdx) check_reorder(host);
        }
      }
}
