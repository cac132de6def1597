#include "standin_cuda/abi_calls.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "support/catch.hpp"

namespace nf4::test::standin {
namespace {

std::string words(const char *format, ...) {
  char text[160];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}

struct Size {
  int64_t rows, cols;
};

// Calls on memory that follows each other.
class Calls {
 public:
  explicit Calls(const Memory &where) : next_(memory(where.kind, where.device)) {}

  std::vector<AbiCall> list;

  void dequant(nf4_dtype dtype, Size size, bool nested, int lead = 0) {
    const nf4_tensor weight = codebook_weight(size, nested);
    void *const out = take<uint8_t>(size.rows * size.cols * 4 + 16) + lead;
    add("nf4_dequant_launch", text(dtype, size, nested), false,
        [=](nf4_stream stream) { return nf4_dequant_launch(&weight, out, dtype, stream); });
  }

  void quantize(nf4_dtype dtype, Size size, bool nested) {
    const nf4_tensor weight = codebook_weight(size, nested);
    const void *const in = take<void>(size.rows * size.cols * 4);
    size_t bytes = 0;
    REQUIRE(nf4_quantize_workspace_size(&weight, &bytes) == NF4_STATUS_OK);
    void *const workspace = take<void>(bytes);
    add("nf4_quantize_launch", text(dtype, size, nested), nested, [=](nf4_stream stream) {
      return nf4_quantize_launch(in, dtype, &weight, workspace, bytes, stream);
    });
  }

  // A rank of 0: without a lora.
  void matmul(nf4_dtype dtype, Size size, bool nested, int64_t m, int rank, bool gradient) {
    const nf4_tensor weight = codebook_weight(size, nested);
    nf4_matmul_args args = matmul_args(dtype, size, m, gradient);
    const nf4_lora lora = adapter(dtype, size, m, rank);
    if (rank > 0) args.lora = &lora;
    size_t bytes = 0;
    const auto sizes = gradient ? nf4_matmul_grad_workspace_size : nf4_matmul_workspace_size;
    REQUIRE(sizes(&weight, &args, &bytes) == NF4_STATUS_OK);
    void *const workspace = take<void>(bytes);
    const auto launch = gradient ? nf4_matmul_grad_launch : nf4_matmul_launch;
    add(gradient ? "nf4_matmul_grad_launch" : "nf4_matmul_launch",
        text(dtype, size, nested) + words(", m %lld, rank %d", static_cast<long long>(m), rank),
        rank > 0, [=](nf4_stream stream) mutable {
          args.lora = rank > 0 ? &lora : nullptr;
          return launch(&weight, &args, workspace, bytes, stream);
        });
  }

  void batch(nf4_dtype dtype, Size size, int64_t m, int count) {
    std::vector<nf4_tensor> weights;
    std::vector<nf4_matmul_args> args;
    for (int i = 0; i < count; ++i) {
      weights.push_back(codebook_weight(size, true));
      args.push_back(matmul_args(dtype, size, m, false));
    }
    batch("nf4_matmul_batch_launch", nf4_matmul_batch_workspace_size, nf4_matmul_batch_launch,
          nf4_matmul_plan, weights, args);
  }

  void grouped(nf4_dtype dtype, Size size, int experts, int64_t m, bool index, bool gradient) {
    const nf4_tensor weight = codebook_weight({experts * size.rows, size.cols}, true);
    grouped(gradient ? "nf4_matmul_grouped_grad_launch" : "nf4_matmul_grouped_launch",
            gradient ? nf4_matmul_grouped_grad_workspace_size : nf4_matmul_grouped_workspace_size,
            gradient ? nf4_matmul_grouped_grad_launch : nf4_matmul_grouped_launch, weight,
            grouped_args(dtype, size, experts, m, index, gradient));
  }

  void int4_dequant(nf4_int4_layout layout, nf4_dtype dtype, Size size, bool g_idx) {
    const nf4_int4_tensor weight = int4_weight(layout, size, 1, g_idx);
    void *const out = take<void>(size.rows * size.cols * 4);
    add("nf4_int4_dequant_launch", text(dtype, size, g_idx), false,
        [=](nf4_stream stream) { return nf4_int4_dequant_launch(&weight, out, dtype, stream); });
  }

  void int4_quantize(nf4_int4_layout layout, nf4_dtype dtype, Size size) {
    const nf4_int4_tensor weight = int4_weight(layout, size);
    const void *const in = take<void>(size.rows * size.cols * 4);
    add("nf4_int4_quantize_launch", text(dtype, size, false), false,
        [=](nf4_stream stream) { return nf4_int4_quantize_launch(in, dtype, &weight, 0, stream); });
  }

  void int4_reorder(nf4_int4_layout layout, Size size) {
    const nf4_int4_tensor from = int4_weight(layout, size, 1, true);
    nf4_int4_tensor to = from;
    to.packed = take<void>(size.rows * size.cols);
    to.g_idx = nullptr;
    to.permutation = take<int32_t>(size.cols * 4);
    add("nf4_int4_reorder_launch", text(NF4_DTYPE_FP16, size, false), true,
        [=](nf4_stream stream) { return nf4_int4_reorder_launch(&from, &to, stream); });
  }

  void int4_matmul(nf4_int4_layout layout, nf4_dtype dtype, Size size, int64_t m, bool permuted) {
    nf4_int4_tensor weight = int4_weight(layout, size);
    if (permuted) weight.permutation = take<int32_t>(size.cols * 4);
    const nf4_matmul_args args = matmul_args(dtype, size, m, false);
    size_t bytes = 0;
    REQUIRE(nf4_int4_matmul_workspace_size(&weight, &args, &bytes) == NF4_STATUS_OK);
    void *const workspace = take<void>(bytes);
    add("nf4_int4_matmul_launch",
        text(dtype, size, permuted) +
            words(", layout %d, m %lld", layout, static_cast<long long>(m)),
        permuted, [=](nf4_stream stream) {
          return nf4_int4_matmul_launch(&weight, &args, workspace, bytes, stream);
        });
  }

  void int4_batch(nf4_int4_layout layout, Size size, int64_t m, int count) {
    std::vector<nf4_int4_tensor> weights;
    std::vector<nf4_matmul_args> args;
    for (int i = 0; i < count; ++i) {
      weights.push_back(int4_weight(layout, size));
      args.push_back(matmul_args(NF4_DTYPE_FP16, size, m, false));
    }
    batch("nf4_int4_matmul_batch_launch", nf4_int4_matmul_batch_workspace_size,
          nf4_int4_matmul_batch_launch, nf4_int4_matmul_plan, weights, args);
  }

  void int4_grouped(nf4_int4_layout layout, Size size, int experts, int64_t m, bool index) {
    grouped("nf4_int4_matmul_grouped_launch", nf4_int4_matmul_grouped_workspace_size,
            nf4_int4_matmul_grouped_launch, int4_weight(layout, size, experts),
            grouped_args(NF4_DTYPE_BF16, size, experts, m, index, false));
  }

 private:
  template <class T>
  T *take(int64_t bytes) {
    uint8_t *const taken = next_;
    next_ += (bytes + 511) / 256 * 256;
    return reinterpret_cast<T *>(taken);
  }

  void add(const char *function, const std::string &what, bool several,
           std::function<nf4_status(nf4_stream)> launch) {
    list.push_back({function, what, several, std::move(launch)});
  }

  static std::string text(nf4_dtype dtype, Size size, bool kind) {
    return words("%lld x %lld, dtype %d, %s", static_cast<long long>(size.rows),
                 static_cast<long long>(size.cols), dtype, kind ? "nested or reordered" : "plain");
  }

  nf4_tensor codebook_weight(Size size, bool nested) {
    nf4_tensor weight{};
    weight.struct_size = sizeof weight;
    weight.format = NF4_FORMAT_NF4;
    weight.blocksize = 64;
    weight.nested_blocksize = nested ? 256 : 0;
    weight.rows = size.rows;
    weight.cols = size.cols;
    const int64_t elements = size.rows * size.cols;
    weight.packed = take<void>(elements / 2 + 1);
    weight.absmax = take<void>(elements / 64 * 4 + 4);
    if (!nested) return weight;
    weight.nested_absmax = take<float>(elements / 64 / 64 + 4);
    weight.nested_code = take<float>(1024);
    weight.nested_offset = take<float>(4);
    return weight;
  }

  nf4_int4_tensor int4_weight(nf4_int4_layout layout, Size size, int experts = 1,
                              bool g_idx = false) {
    constexpr int32_t kGroup = 128;
    nf4_int4_tensor weight{};
    weight.struct_size = sizeof weight;
    weight.layout = layout;
    weight.scales_dtype = NF4_DTYPE_FP16;
    weight.group_size = size.cols % kGroup == 0 ? kGroup : -1;
    weight.rows = size.rows;
    weight.cols = size.cols;
    const int64_t elements = experts * (size.rows + 8) * (size.cols + 8);
    weight.packed = take<void>(elements / 2);
    weight.scales = take<void>(elements / 4);
    weight.zeros = take<void>(elements / 4);
    if (g_idx) weight.g_idx = take<int32_t>(size.cols * 4);
    return weight;
  }

  nf4_matmul_args matmul_args(nf4_dtype dtype, Size size, int64_t m, bool gradient) {
    nf4_matmul_args args{};
    args.struct_size = sizeof args;
    args.dtype = dtype;
    args.m = m;
    args.x_stride = gradient ? size.rows : size.cols;
    args.y_stride = gradient ? size.cols : size.rows;
    args.x = take<void>(m * args.x_stride * 4);
    args.y = take<void>(m * args.y_stride * 4);
    if (!gradient) args.bias = take<void>(size.rows * 4);
    return args;
  }

  nf4_lora adapter(nf4_dtype dtype, Size size, int64_t m, int rank) {
    nf4_lora lora{};
    if (rank == 0) return lora;
    lora.struct_size = sizeof lora;
    lora.dtype = dtype;
    lora.rank = rank;
    lora.scale = 0.5f;
    lora.a = take<void>(rank * size.cols * 4);
    lora.a_stride = size.cols;
    lora.b = take<void>(rank * size.rows * 4);
    lora.b_stride = rank;
    lora.product = take<void>(m * rank * 4);
    return lora;
  }

  nf4_grouped_args grouped_args(nf4_dtype dtype, Size size, int experts, int64_t m, bool index,
                                bool gradient) {
    const nf4_matmul_args plain = matmul_args(dtype, size, m, gradient);
    nf4_grouped_args args{};
    args.struct_size = sizeof args;
    args.dtype = dtype;
    args.experts = experts;
    args.m = m;
    args.x = plain.x;
    args.x_stride = plain.x_stride;
    args.x_rows = m;
    args.y = plain.y;
    args.y_stride = plain.y_stride;
    args.ends = take<int32_t>(experts * 4);
    if (index) args.x_index = take<int32_t>(m * 4);
    args.row_scale = take<float>(m * 4);
    return args;
  }

  template <class Sizes, class Launch, class Plan, class Tensor>
  void batch(const char *function, const Sizes &sizes, const Launch &launch, const Plan &plan,
             const std::vector<Tensor> &weights, const std::vector<nf4_matmul_args> &args) {
    const auto addresses = [](const std::vector<Tensor> &all) {
      std::vector<const Tensor *> found;
      for (const Tensor &each : all) found.push_back(&each);
      return found;
    };
    const size_t count = args.size();
    size_t bytes = 0;
    REQUIRE(sizes(addresses(weights).data(), args.data(), count, &bytes) == NF4_STATUS_OK);
    void *const workspace = take<void>(bytes);
    const Size size{weights[0].rows, weights[0].cols};
    const auto m = static_cast<long long>(args[0].m);
    add(function, text(args[0].dtype, size, true) + words(", m %lld, %zu products", m, count), true,
        [=](nf4_stream stream) {
          return launch(addresses(weights).data(), args.data(), count, workspace, bytes, stream);
        });
    list.back().plan = [=](int &launches) {
      std::vector<int32_t> launch_of(count);
      std::vector<const char *> kernels(count);
      const nf4_status status =
          plan(addresses(weights).data(), args.data(), count, 0, launch_of.data(), kernels.data());
      launches = *std::max_element(launch_of.begin(), launch_of.end()) + 1;
      return status;
    };
  }

  template <class Sizes, class Launch, class Tensor>
  void grouped(const char *function, const Sizes &sizes, const Launch &launch, const Tensor &weight,
               const nf4_grouped_args &args) {
    size_t bytes = 0;
    REQUIRE(sizes(&weight, &args, &bytes) == NF4_STATUS_OK);
    void *const workspace = take<void>(bytes);
    const bool index = args.x_index != nullptr;
    add(function,
        text(args.dtype, {weight.rows, weight.cols}, true) +
            words(", %d experts, m %lld%s", args.experts, static_cast<long long>(args.m),
                  index ? ", x_index" : ""),
        index, [=](nf4_stream stream) { return launch(&weight, &args, workspace, bytes, stream); });
  }

  uint8_t *next_;
};

constexpr nf4_dtype kFp32 = NF4_DTYPE_FP32, kFp16 = NF4_DTYPE_FP16, kBf16 = NF4_DTYPE_BF16;
constexpr nf4_int4_layout kLayouts[] = {NF4_INT4_GPTQ, NF4_INT4_AWQ, NF4_INT4_COMPRESSED_TENSORS};

}  // namespace

std::vector<AbiCall> all_calls(const Memory &memory) {
  Calls calls(memory);
  for (const nf4_dtype dtype : {kFp32, kFp16, kBf16})
    for (const bool nested : {false, true})
      for (const Size size : {Size{1, 1}, {3, 97}, {4096, 4096}, {1 << 20, 40000}}) {
        calls.dequant(dtype, size, nested);
        calls.dequant(dtype, size, nested, 4);
        calls.quantize(dtype, size, nested);
      }
  for (const Size size : {Size{4096, 4096}, {14336, 4096}, {4096, 14336}, {1000, 1088}, {77, 91}})
    for (const int64_t m : {1, 2, 7, 16, 17, 64, 100, 300, 1024, 5000}) {
      for (const bool gradient : {false, true}) {
        for (const int rank : {0, 8, 33, 64})
          calls.matmul(kBf16, size, rank != 8, m, rank, gradient);
        calls.matmul(kFp16, size, false, m, 0, gradient);
        if (m <= 16 || gradient) calls.matmul(kFp32, size, true, m, 8, gradient);
      }
      calls.batch(kBf16, size, m, 3);
    }
  for (const Size size : {Size{1536, 2048}, {2880, 2880}, {64, 192}})
    for (const int64_t m : {1, 8, 64, 512, 4096})
      for (const bool index : {false, true}) {
        for (const bool gradient : {false, true}) calls.grouped(kBf16, size, 8, m, index, gradient);
        for (const nf4_int4_layout layout : kLayouts) calls.int4_grouped(layout, size, 8, m, index);
      }
  for (const nf4_int4_layout layout : kLayouts)
    for (const Size size : {Size{4096, 4096}, {14336, 4096}, {1000, 1088}}) {
      for (const nf4_dtype dtype : {kFp32, kFp16, kBf16}) {
        for (const bool g_idx : {false, true}) calls.int4_dequant(layout, dtype, size, g_idx);
        calls.int4_quantize(layout, dtype, size);
      }
      calls.int4_reorder(layout, size);
      for (const int64_t m : {1, 2, 8, 16, 17, 64, 300, 5000}) {
        for (const bool permuted : {false, true})
          calls.int4_matmul(layout, kFp16, size, m, permuted);
        calls.int4_matmul(layout, kBf16, size, m, false);
      }
      calls.int4_batch(layout, size, 1, 3);
    }
  return calls.list;
}

std::vector<AbiCall> some_calls(const Memory &memory) {
  constexpr Size kSize{4096, 4096}, kExperts{1536, 2048};
  Calls calls(memory);
  calls.dequant(kBf16, kSize, true);
  calls.quantize(kBf16, kSize, false);
  calls.quantize(kBf16, {4096, 14336}, true);
  for (const int rank : {0, 8, 33})
    for (const int64_t m : {1, 300}) {
      calls.matmul(kBf16, kSize, true, m, rank, false);
      calls.matmul(kBf16, kSize, true, m, rank, true);
    }
  calls.matmul(kBf16, {14336, 4096}, true, 2048, 0, false);
  calls.batch(kBf16, kSize, 1, 3);
  calls.batch(kBf16, kSize, 300, 2);
  for (const int64_t m : {8, 4096}) {
    calls.grouped(kBf16, kExperts, 8, m, true, false);
    calls.grouped(kBf16, kExperts, 8, m, false, true);
    calls.int4_grouped(NF4_INT4_AWQ, kExperts, 8, m, true);
  }
  calls.int4_dequant(NF4_INT4_AWQ, kFp16, kSize, false);
  calls.int4_quantize(NF4_INT4_GPTQ, kFp16, kSize);
  calls.int4_reorder(NF4_INT4_GPTQ, kSize);
  for (const nf4_int4_layout layout : kLayouts)
    for (const int64_t m : {1, 300}) calls.int4_matmul(layout, kFp16, kSize, m, m > 1);
  calls.int4_matmul(NF4_INT4_GPTQ, kFp16, kSize, 1, true);
  calls.int4_batch(NF4_INT4_GPTQ, kSize, 1, 3);
  return calls.list;
}

std::vector<AbiCall> queries() {
  std::vector<AbiCall> list{{"nf4_device_info", "device 0", false, [](nf4_stream) {
                               nf4_device info{};
                               info.struct_size = sizeof info;
                               return nf4_device_info(0, &info);
                             }}};
  for (const AbiCall &call : some_calls())
    if (call.plan)
      list.push_back({"plan of", call.text(), false, [call](nf4_stream) {
                        int launches = 0;
                        return call.plan(launches);
                      }});
  return list;
}

}  // namespace nf4::test::standin
