// Calls of nf4.h of one shape and kind each.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "standin_cuda/abi_calls.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace nf4::test::standin {

inline std::string words(const char *format, ...) {
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

// Calls on memory that follows each other. With random numbers, what the arguments leave open is
// random: how memory is aligned, strides, blocks, groups, codebooks, what may be NULL.
class CallBuilder {
 public:
  explicit CallBuilder(const Memory &where, Rng *rng = nullptr)
      : next_(memory(where.kind, where.device)), quarter_(next_ + kMemoryBytes / 4), rng_(rng) {}

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
    void *const workspace = take_workspace(bytes);
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
    void *const workspace = take_workspace(bytes);
    const auto launch = gradient ? nf4_matmul_grad_launch : nf4_matmul_launch;
    add(gradient ? "nf4_matmul_grad_launch" : "nf4_matmul_launch",
        text(dtype, size, nested) + words(", m %lld, rank %d", static_cast<long long>(m), rank),
        rank > 0, [=](nf4_stream stream) mutable {
          args.lora = rank > 0 ? &lora : nullptr;
          return launch(&weight, &args, workspace, bytes, stream);
        });
  }

  // Of both matrices, or of one of them.
  void lora_grad(nf4_dtype dtype, Size size, int64_t m, int rank) {
    nf4_lora_grad_args args{};
    args.struct_size = sizeof args;
    args.dtype = dtype;
    args.grad_dtype = one_in(2) ? NF4_DTYPE_FP32 : dtype;
    args.rank = rank;
    args.scale = 0.5f;
    args.m = m;
    args.rows = size.rows;
    args.cols = size.cols;
    args.x_stride = stride(size.cols, m);
    args.x = take<void>(strided_bytes(m, args.x_stride, size.cols));
    args.dy_stride = stride(size.rows, m);
    args.dy = take<void>(strided_bytes(m, args.dy_stride, size.rows));
    args.p = take<void>(m * rank * 4);
    args.q = take<void>(m * rank * 4);
    args.da_stride = stride(size.cols, rank);
    args.db_stride = stride(rank, size.rows);
    if (!one_in(4)) args.da = take<void>(strided_bytes(rank, args.da_stride, size.cols));
    if (args.da == nullptr || !one_in(4))
      args.db = take<void>(strided_bytes(size.rows, args.db_stride, rank));
    add("nf4_lora_grad_launch",
        text(dtype, size, false) + words(", m %lld, rank %d", static_cast<long long>(m), rank),
        false, [=](nf4_stream stream) { return nf4_lora_grad_launch(&args, stream); });
  }

  void batch(nf4_dtype dtype, Size size, int64_t m, int count) {
    batch(
        "nf4_matmul_batch_launch", nf4_matmul_batch_workspace_size, nf4_matmul_batch_launch,
        nf4_matmul_plan, [&] { return codebook_weight(size, true); }, dtype, m, count);
  }

  void grouped(nf4_dtype dtype, Size size, int experts, int64_t m, bool index, bool gradient) {
    const nf4_tensor weight =
        codebook_weight({experts * size.rows, size.cols}, !one_in(2), experts);
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
    const nf4_int4_tensor weight = int4_weight(layout, size, 1, false, true);
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
    void *const workspace = take_workspace(bytes);
    add("nf4_int4_matmul_launch",
        text(dtype, size, permuted) +
            words(", layout %d, m %lld", layout, static_cast<long long>(m)),
        permuted, [=](nf4_stream stream) {
          return nf4_int4_matmul_launch(&weight, &args, workspace, bytes, stream);
        });
  }

  void int4_batch(nf4_int4_layout layout, Size size, int64_t m, int count) {
    batch(
        "nf4_int4_matmul_batch_launch", nf4_int4_matmul_batch_workspace_size,
        nf4_int4_matmul_batch_launch, nf4_int4_matmul_plan,
        [&] { return int4_weight(layout, size); }, NF4_DTYPE_FP16, m, count);
  }

  void int4_grouped(nf4_int4_layout layout, Size size, int experts, int64_t m, bool index) {
    grouped("nf4_int4_matmul_grouped_launch", nf4_int4_matmul_grouped_workspace_size,
            nf4_int4_matmul_grouped_launch, int4_weight(layout, size, experts),
            grouped_args(NF4_DTYPE_BF16, size, experts, m, index, false));
  }

 private:
  bool one_in(int64_t n) { return rng_ != nullptr && rng_->one_in(n); }

  // On 256 bytes, or on 4 of them.
  template <class T>
  T *take(int64_t bytes) {
    uint8_t *const taken = next_ + (one_in(3) ? 4 * rng_->below(16) : 0);
    next_ += (bytes + 767) / 256 * 256;
    return reinterpret_cast<T *>(taken);
  }
  void *take_workspace(size_t bytes) {
    uint8_t *const taken = next_;
    next_ += (bytes + 511) / 256 * 256;
    return taken;
  }

  // Of so many rows; of two now and then more than a tensor map holds, as long as memory lasts.
  int64_t stride(int64_t least, int64_t rows) {
    if (!one_in(3)) return least;
    const int64_t more = one_in(2) ? rng_->below(70) : 64 - least % 8;
    return least + more + (rows == 2 && next_ < quarter_ && one_in(2) ? int64_t{1} << 39 : 0);
  }
  static int64_t strided_bytes(int64_t rows, int64_t stride, int64_t width) {
    return rows == 0 ? 0 : ((rows - 1) * stride + width) * 4;
  }

  void add(const char *function, const std::string &what, bool several,
           std::function<nf4_status(nf4_stream)> launch) {
    list.push_back({function, what, several, std::move(launch)});
  }

  static std::string text(nf4_dtype dtype, Size size, bool kind) {
    return words("%lld x %lld, dtype %d, %s", static_cast<long long>(size.rows),
                 static_cast<long long>(size.cols), dtype, kind ? "nested or reordered" : "plain");
  }

  nf4_tensor codebook_weight(Size size, bool nested, int experts = 1) {
    nf4_tensor weight{};
    weight.struct_size = sizeof weight;
    weight.format = NF4_FORMAT_NF4;
    const int64_t elements = size.rows * size.cols;
    weight.blocksize = one_in(2) ? 32 << rng_->below(8) : 64;
    if (experts > 1)
      while (elements / experts % weight.blocksize != 0) weight.blocksize /= 2;
    weight.nested_blocksize = !nested ? 0 : one_in(2) ? 1 << rng_->below(12) : 256;
    weight.rows = size.rows;
    weight.cols = size.cols;
    weight.packed = take<uint8_t>(elements / 2 + 1) + (one_in(8) ? 1 : 0);
    weight.absmax = take<void>(elements / 8 + 4);
    if (one_in(4)) weight.codebook = take<float>(64);
    if (!nested) return weight;
    weight.nested_absmax = take<float>(elements / 8 + 4);
    weight.nested_code = take<float>(1024);
    weight.nested_offset = take<float>(4);
    return weight;
  }

  nf4_int4_tensor int4_weight(nf4_int4_layout layout, Size size, int experts = 1,
                              bool g_idx = false, bool quantized = false) {
    constexpr int32_t kGroup = 128;
    nf4_int4_tensor weight{};
    weight.struct_size = sizeof weight;
    weight.layout = layout;
    weight.scales_dtype = NF4_DTYPE_FP16;
    weight.group_size = size.cols % kGroup == 0 && !one_in(4) ? kGroup
                        : size.cols % 8 == 0 && one_in(2)     ? 8
                                                              : -1;
    if (one_in(2)) weight.scales_dtype = NF4_DTYPE_BF16;
    weight.rows = size.rows;
    weight.cols = size.cols;
    const int64_t elements = experts * (size.rows + 8) * (size.cols + 8);
    weight.packed = take<void>(elements / 2);
    weight.scales = take<void>(elements / 4);
    weight.zeros = one_in(4) && !quantized ? nullptr : take<void>(elements / 4);
    if (g_idx) weight.g_idx = take<int32_t>(size.cols * 4);
    return weight;
  }

  nf4_matmul_args matmul_args(nf4_dtype dtype, Size size, int64_t m, bool gradient) {
    nf4_matmul_args args{};
    args.struct_size = sizeof args;
    args.dtype = dtype;
    args.m = m;
    args.x_stride = stride(gradient ? size.rows : size.cols, m);
    args.y_stride = stride(gradient ? size.cols : size.rows, m);
    args.x = take<void>(strided_bytes(m, args.x_stride, size.rows + size.cols));
    args.y = take<void>(strided_bytes(m, args.y_stride, size.rows + size.cols));
    if (!gradient && !one_in(2)) args.bias = take<void>(size.rows * 4);
    return args;
  }

  nf4_lora adapter(nf4_dtype dtype, Size size, int64_t m, int rank) {
    nf4_lora lora{};
    if (rank == 0) return lora;
    lora.struct_size = sizeof lora;
    lora.dtype = one_in(3) ? NF4_DTYPE_FP32 : dtype;
    lora.rank = rank;
    lora.scale = 0.5f;
    lora.a_stride = stride(size.cols, rank);
    lora.a = take<void>(strided_bytes(rank, lora.a_stride, size.cols));
    lora.b_stride = stride(rank, size.rows);
    lora.b = take<void>(strided_bytes(size.rows, lora.b_stride, rank));
    if (!one_in(4)) lora.product = take<void>(m * rank * 4);
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
    if (!one_in(2)) args.row_scale = take<float>(m * 4);
    return args;
  }

  template <class Sizes, class Launch, class Plan, class MakeWeight>
  void batch(const char *function, const Sizes &sizes, const Launch &launch, const Plan &plan,
             const MakeWeight &make_weight, nf4_dtype dtype, int64_t m, int products) {
    using Tensor = decltype(make_weight());
    std::vector<Tensor> weights;
    std::vector<nf4_matmul_args> args;
    for (int i = 0; i < products; ++i) {
      weights.push_back(make_weight());
      args.push_back(matmul_args(dtype, {weights[i].rows, weights[i].cols}, m, false));
    }
    const auto addresses = [](const std::vector<Tensor> &all) {
      std::vector<const Tensor *> found;
      for (const Tensor &each : all) found.push_back(&each);
      return found;
    };
    const size_t count = args.size();
    size_t bytes = 0;
    REQUIRE(sizes(addresses(weights).data(), args.data(), count, &bytes) == NF4_STATUS_OK);
    void *const workspace = take_workspace(bytes);
    const Size size{weights[0].rows, weights[0].cols};
    add(function,
        text(dtype, size, true) +
            words(", m %lld, %d products", static_cast<long long>(m), products),
        true, [=](nf4_stream stream) {
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
    void *const workspace = take_workspace(bytes);
    const bool index = args.x_index != nullptr;
    add(function,
        text(args.dtype, {weight.rows, weight.cols}, true) +
            words(", %d experts, m %lld%s", args.experts, static_cast<long long>(args.m),
                  index ? ", x_index" : ""),
        index, [=](nf4_stream stream) { return launch(&weight, &args, workspace, bytes, stream); });
  }

  uint8_t *next_, *quarter_;
  Rng *rng_;
};

}  // namespace nf4::test::standin
