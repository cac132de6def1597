// The kernels that multiply on each GPU: none falls back to those that run anywhere.
#include <cstring>
#include <nf4/products.hpp>

#include "standin_cuda/call_builder.hpp"
#include "standin_cuda/child.hpp"
#include "standin_cuda/machines.hpp"

using namespace nf4::test::standin;

namespace {

constexpr Size kSize{4096, 4096}, kExpert{1536, 2048};
constexpr nf4_dtype kDtype = NF4_DTYPE_BF16;

struct Row {
  Gpu gpu;
  const char *family;  // that a build needs for it
  void (*build)(CallBuilder &);
  const char *kernel;  // the last one that is launched
};

template <int64_t m>
void matmul(CallBuilder &calls) {
  calls.matmul(kDtype, kSize, true, m, 0, false);
}
template <int64_t m>
void fp16_matmul(CallBuilder &calls) {
  calls.matmul(NF4_DTYPE_FP16, kSize, true, m, 0, false);
}
template <int64_t m>
void gradient(CallBuilder &calls) {
  calls.matmul(kDtype, kSize, true, m, 0, true);
}
template <int64_t m>
void batch(CallBuilder &calls) {
  calls.batch(kDtype, kSize, m, 3);
}
template <int64_t m, bool gradient>
void grouped(CallBuilder &calls) {
  calls.grouped(kDtype, kExpert, 8, m, true, gradient);
}
template <nf4_int4_layout layout, int64_t m>
void int4(CallBuilder &calls) {
  calls.int4_matmul(layout, kDtype, kSize, m, false);
}
template <nf4_int4_layout layout, int64_t m>
void int4_grouped(CallBuilder &calls) {
  calls.int4_grouped(layout, kExpert, 8, m, true);
}

constexpr Row kRows[] = {
    {kH200, "sm90", matmul<1>, "matmul_skinny"},
    {kH200, "sm90", matmul<300>, "matmul_wgmma"},
    {kH200, "sm90", gradient<1>, "matmul_grad_skinny"},
    {kH200, "sm90", gradient<300>, "matmul_wgmma"},
    {kH200, "sm90", batch<1>, "matmul_skinny_batch"},
    {kH200, "sm90", grouped<8, false>, "matmul_grouped_skinny"},
    {kH200, "sm90", grouped<4096, false>, "matmul_wgmma"},
    {kH200, "sm90", grouped<4096, true>, "matmul_wgmma"},
    {kH200, "sm90", int4<NF4_INT4_GPTQ, 1>, "int4_matmul_strip"},
    {kH200, "sm90", int4<NF4_INT4_AWQ, 1>, "int4_matmul_strip"},
    {kH200, "sm90", int4<NF4_INT4_COMPRESSED_TENSORS, 1>, "int4_matmul_skinny"},
    {kH200, "sm90", int4<NF4_INT4_GPTQ, 300>, "matmul_wgmma"},
    {kH200, "sm90", int4<NF4_INT4_AWQ, 300>, "matmul_wgmma"},
    {kH200, "sm90", int4<NF4_INT4_COMPRESSED_TENSORS, 300>, "matmul_wgmma"},
    {kH200, "sm90", int4_grouped<NF4_INT4_GPTQ, 8>, "int4_matmul_grouped_skinny"},
    {kH200, "sm90", int4_grouped<NF4_INT4_COMPRESSED_TENSORS, 8>, "int4_matmul_grouped_skinny"},
    {kH200, "sm90", int4_grouped<NF4_INT4_GPTQ, 4096>, "matmul_wgmma"},
    {kH200, "sm90", int4_grouped<NF4_INT4_AWQ, 4096>, "matmul_wgmma"},
    {kH200, "sm90", int4_grouped<NF4_INT4_COMPRESSED_TENSORS, 4096>, "matmul_wgmma"},
    {kA100, "sm80", matmul<1>, "matmul_skinny"},
    {kA100, "sm80", matmul<300>, "matmul_multistage"},
    {kA100, "sm80", gradient<1>, "matmul_multistage"},
    {kA100, "sm80", gradient<300>, "matmul_multistage"},
    {kA100, "sm80", batch<1>, "matmul_skinny_batch"},
    {kA100, "sm80", int4<NF4_INT4_GPTQ, 1>, "int4_matmul_skinny"},
    {kA100, "sm80", int4<NF4_INT4_GPTQ, 300>, "matmul_multistage"},
    {kA100, "sm80", int4<NF4_INT4_AWQ, 1>, "matmul_multistage"},
    {kA100, "sm80", int4<NF4_INT4_AWQ, 300>, "matmul_multistage"},
    {kA100, "sm80", int4<NF4_INT4_COMPRESSED_TENSORS, 300>, "matmul_multistage"},
    // Skinny kernels of the narrow layout fit its 99 KiB of shared memory.
    {kL4, "sm80", matmul<1>, "matmul_skinny"},
    {kL4, "sm80", matmul<16>, "matmul_skinny"},
    {kL4, "sm80", batch<1>, "matmul_skinny_batch"},
    {kL4, "sm80", grouped<8, false>, "matmul_grouped_skinny"},
    {kL4, "sm80", matmul<300>, "matmul_multistage"},
    {kL4, "sm80", gradient<1>, "matmul_multistage"},
    {kL4, "sm80", gradient<300>, "matmul_multistage"},
    {kL4, "sm80", int4<NF4_INT4_GPTQ, 1>, "int4_matmul_skinny"},
    {kL4, "sm80", int4<NF4_INT4_AWQ, 300>, "matmul_multistage"},
    // It has as much shared memory, and TMA, which kernels of a build with its machine code use.
    {kRtx5090, "sm90", matmul<1>, "matmul_skinny"},
    {kRtx5090, "sm90", matmul<16>, "matmul_skinny"},
    {kRtx5090, "sm90", batch<1>, "matmul_skinny_batch"},
    {kRtx5090, "sm90", grouped<8, false>, "matmul_grouped_skinny"},
    {kRtx5090, "sm90", matmul<300>, "matmul_multistage"},
    {kRtx5090, "sm90", gradient<1>, "matmul_multistage"},
    {kRtx5090, "sm90", gradient<300>, "matmul_multistage"},
    {kRtx5090, "sm90", int4<NF4_INT4_GPTQ, 1>, "int4_matmul_skinny"},
    {kRtx5090, "sm90", int4<NF4_INT4_COMPRESSED_TENSORS, 1>, "int4_matmul_skinny"},
    {kRtx5090, "sm90", int4<NF4_INT4_AWQ, 1>, "matmul_mma_few"},
    {kRtx5090, "sm90", int4<NF4_INT4_AWQ, 9>, "matmul_multistage"},
    {kRtx5090, "sm90", int4<NF4_INT4_GPTQ, 300>, "matmul_multistage"},
    {kRtx5090, "sm80", matmul<1>, "matmul_skinny"},
    {kRtx5090, "sm80", matmul<300>, "matmul_multistage"},
    {kRtx5090, "sm80", gradient<300>, "matmul_multistage"},
    {kRtx5090, "sm80", int4<NF4_INT4_GPTQ, 1>, "int4_matmul_skinny"},
    // Its tensor cores multiply fp16 alone.
    {kT4, "sm75", matmul<1>, "matmul_mma"},
    {kT4, "sm75", fp16_matmul<1>, "matmul_skinny"},
    {kT4, "sm75", fp16_matmul<300>, "matmul_multistage"},
    {kT4, "sm75", int4<NF4_INT4_GPTQ, 300>, "matmul_mma"},
    {kT4, "sm75", gradient<300>, "matmul_mma"},
};

}  // namespace

TEST_CASE("each GPU gets its best kernels", "[standin]") {
  std::string found;
  size_t tried = 0;
  for (const Row &row : kRows) {
    const auto *const family = nf4::cuda::family_for(row.gpu.compute_capability);
    if (family == nullptr || std::strcmp(family->name, row.family) != 0) continue;
    ++tried;
    CallBuilder calls({});
    row.build(calls);
    found += in_child([&]() -> std::string {
      set_gpus({row.gpu});
      const AbiCall &call = calls.list.front();
      // As it is mangled: a name after its length.
      const std::string name = std::to_string(std::strlen(row.kernel)) + row.kernel;
      if (call.launch(nullptr) == NF4_STATUS_OK &&
          launches().back().kernel.find(name) != std::string::npos)
        return "";
      return call.text() + ": not " + row.kernel + ", " + enqueued() + nf4_last_error();
    });
  }
  REQUIRE(found == "");
  proved("cuda-choices", tried);
}

// fp32 has kernels for few rows of x alone, and fewer than 2 rows are fused where they have a
// skinny kernel.
TEST_CASE("products prefer the dense way if each of them does", "[standin]") {
  const auto prefers = [](const Gpu &gpu, std::initializer_list<int64_t> rows, nf4_dtype dtype) {
    nf4_tensor weight{};
    weight.struct_size = sizeof weight;
    weight.format = NF4_FORMAT_NF4;
    weight.blocksize = 64;
    weight.rows = weight.cols = 4096;
    nf4::Products products;
    for (const int64_t m : rows)
      products.add(weight, {sizeof(nf4_matmul_args), dtype, 0, m, nullptr, 4096, nullptr, nullptr,
                            4096, nullptr});
    return in_child([&]() -> std::string {
      set_gpus({gpu});
      return products.prefer_dense(0) ? "dense" : "fused";
    });
  };
  for (const Gpu &gpu : gpus()) {
    CHECK(prefers(gpu, {17, 300}, NF4_DTYPE_FP32) == "dense");
    CHECK(prefers(gpu, {}, NF4_DTYPE_FP32) == "fused");
    const std::string one = prefers(gpu, {1}, NF4_DTYPE_FP32);
    CHECK(prefers(gpu, {17, 1}, NF4_DTYPE_FP32) == one);
    CHECK(prefers(gpu, {300}, NF4_DTYPE_BF16) ==
          (gpu.compute_capability == kH200.compute_capability ? "fused" : "dense"));
  }
}

// On Hopper the CTAs that multiply x by A, where TMA can read A, leave fewer multiprocessors to the
// product, which may be faster by another kernel then.
TEST_CASE("a plan sees how an adapter's A is aligned", "[standin]") {
  if (best_gpu().compute_capability != kH200.compute_capability) return;
  const auto planned = [](uintptr_t a) {
    nf4_tensor weight{};
    weight.struct_size = sizeof weight;
    weight.format = NF4_FORMAT_NF4;
    weight.blocksize = 64;
    weight.rows = 1024;
    weight.cols = 2048;
    nf4_lora lora{};
    lora.struct_size = sizeof lora;
    lora.dtype = kDtype;
    lora.rank = 8;
    lora.a = reinterpret_cast<const void *>(a);
    lora.a_stride = 2048;
    lora.b_stride = 8;
    const nf4_matmul_args args{sizeof args, kDtype,  0,       1536, nullptr,
                               2048,        nullptr, nullptr, 1024, &lora};
    return in_child([&]() -> std::string {
      set_gpus({kH200});
      const nf4_tensor *const weights[] = {&weight};
      int32_t launch = -1;
      const char *kernel = nullptr;
      const nf4_status status = nf4_matmul_plan(weights, &args, 1, 0, &launch, &kernel);
      return status == NF4_STATUS_OK && launch == 0 ? kernel : nf4_last_error();
    });
  };
  const std::string by_tma = planned(16), by_loads = planned(18);
  CHECK(by_tma.substr(0, 6) == "wgmma_");
  CHECK(by_loads.substr(0, 6) == "wgmma_");
  CHECK(by_tma != by_loads);
}
