// Checks which way a product is expected to take less time, on each kind of GPU: what is
// conservative where nobody has timed libnf4, and Hopper's own choices.
#include <cstdint>
#include <cstring>
#include <string>

#include "nf4/nf4.h"
#include "standin_cuda/child.hpp"
#include "standin_cuda/machines.hpp"
#include "support/catch.hpp"

using namespace nf4::test::standin;

namespace {

constexpr nf4_path kFused = NF4_PATH_FUSED, kDense = NF4_PATH_DENSE;

struct Shape {
  int64_t rows = 4096, cols = 4096;
  int32_t blocksize = 64, group_size = 128;
  bool codebook = false, mxfp4 = false;
  bool g_idx = false, permutation = false, odd_absmax = false;
  int32_t rank = 0;
};

// Pointers are numbers: nothing is read through them.
template <class T = void>
T *some() {
  return reinterpret_cast<T *>(uintptr_t{4096});
}

nf4_tensor codes(const Shape &shape) {
  nf4_tensor weight{};
  weight.struct_size = sizeof weight;
  weight.format = NF4_FORMAT_NF4;
  weight.blocksize = shape.blocksize;
  weight.nested_blocksize = 256;
  weight.rows = shape.rows;
  weight.cols = shape.cols;
  weight.packed = some();
  weight.absmax = some<char>() + (shape.odd_absmax ? 1 : 0);
  if (shape.codebook) weight.codebook = some<const float>();
  if (shape.mxfp4) {
    weight.format = NF4_FORMAT_MXFP4;
    weight.blocksize = 32;
    weight.nested_blocksize = 0;
  }
  return weight;
}

nf4_int4_tensor integers(nf4_int4_layout layout, const Shape &shape) {
  nf4_int4_tensor weight{};
  weight.struct_size = sizeof weight;
  weight.layout = layout;
  weight.scales_dtype = NF4_DTYPE_FP16;
  weight.group_size = shape.group_size;
  weight.zero_offset = layout == NF4_INT4_GPTQ ? 1 : 0;
  weight.rows = shape.rows;
  weight.cols = shape.cols;
  weight.packed = weight.scales = weight.zeros = some();
  if (shape.g_idx) weight.g_idx = some<const int32_t>();
  if (shape.permutation) weight.permutation = some<const int32_t>();
  return weight;
}

nf4_matmul_args args_of(nf4_dtype dtype, int64_t m, int64_t columns, int64_t outputs) {
  nf4_matmul_args args{};
  args.struct_size = sizeof args;
  args.dtype = dtype;
  args.m = m;
  args.x = some();
  args.x_stride = columns;
  args.y_stride = outputs;
  return args;
}

using Ask = nf4_status (*)(nf4_dtype dtype, int64_t m, const Shape &shape, nf4_path *path);

nf4_status forward(nf4_dtype dtype, int64_t m, const Shape &shape, nf4_path *path) {
  const nf4_tensor weight = codes(shape);
  const nf4_matmul_args args = args_of(dtype, m, shape.cols, shape.rows);
  return nf4_matmul_path(&weight, &args, 0, path);
}
nf4_status gradient(nf4_dtype dtype, int64_t m, const Shape &shape, nf4_path *path) {
  const nf4_tensor weight = codes(shape);
  nf4_matmul_args args = args_of(dtype, m, shape.rows, shape.cols);
  nf4_lora lora{};
  lora.struct_size = sizeof lora;
  lora.dtype = dtype;
  lora.rank = shape.rank;
  lora.a_stride = shape.cols;
  lora.b_stride = shape.rank;
  if (shape.rank > 0) args.lora = &lora;
  return nf4_matmul_grad_path(&weight, &args, 0, path);
}
template <nf4_int4_layout layout>
nf4_status int4(nf4_dtype dtype, int64_t m, const Shape &shape, nf4_path *path) {
  const nf4_int4_tensor weight = integers(layout, shape);
  const nf4_matmul_args args = args_of(dtype, m, shape.cols, shape.rows);
  return nf4_int4_matmul_path(&weight, &args, 0, path);
}
constexpr Ask gptq = int4<NF4_INT4_GPTQ>, awq = int4<NF4_INT4_AWQ>;

nf4_grouped_args grouped_args(nf4_dtype dtype, int64_t m, int64_t columns, int64_t outputs) {
  nf4_grouped_args args{};
  args.struct_size = sizeof args;
  args.dtype = dtype;
  args.experts = 128;
  args.m = args.x_rows = m;
  args.x = some();
  args.x_stride = columns;
  args.y_stride = outputs;
  args.ends = some<const int32_t>();
  return args;
}
nf4_tensor stack(Shape shape) {
  shape.rows = 128 * 1536;
  shape.cols = 2048;
  return codes(shape);
}
nf4_status experts(nf4_dtype dtype, int64_t m, const Shape &shape, nf4_path *path) {
  const nf4_tensor weight = stack(shape);
  const nf4_grouped_args args = grouped_args(dtype, m, 2048, 1536);
  return nf4_matmul_grouped_path(&weight, &args, 0, path);
}
nf4_status experts_gradient(nf4_dtype dtype, int64_t m, const Shape &shape, nf4_path *path) {
  const nf4_tensor weight = stack(shape);
  const nf4_grouped_args args = grouped_args(dtype, m, 1536, 2048);
  return nf4_matmul_grouped_grad_path(&weight, &args, 0, path);
}
nf4_status int4_experts(nf4_dtype dtype, int64_t m, const Shape &shape, nf4_path *path) {
  Shape of_expert = shape;
  of_expert.rows = 1536;
  of_expert.cols = 2048;
  const nf4_int4_tensor weight = integers(NF4_INT4_GPTQ, of_expert);
  const nf4_grouped_args args = grouped_args(dtype, m, 2048, 1536);
  return nf4_int4_matmul_grouped_path(&weight, &args, 0, path);
}
nf4_status lora_grad(nf4_dtype dtype, int64_t m, const Shape &shape, nf4_path *path) {
  nf4_lora_grad_args args{};
  args.struct_size = sizeof args;
  args.dtype = args.grad_dtype = dtype;
  args.rank = shape.rank;
  args.m = m;
  args.rows = args.cols = args.x_stride = args.dy_stride = args.da_stride = 4096;
  args.db_stride = shape.rank;
  args.da = args.db = some();
  return nf4_lora_grad_path(&args, 0, path);
}

constexpr nf4_dtype kFp32 = NF4_DTYPE_FP32, kFp16 = NF4_DTYPE_FP16, kBf16 = NF4_DTYPE_BF16;

Shape sized(int64_t rows, int64_t cols) { return {rows, cols}; }
Shape blocks_of(int32_t size) {
  Shape shape;
  shape.blocksize = size;
  return shape;
}
Shape groups_of(int32_t size) {
  Shape shape;
  shape.group_size = size;
  return shape;
}
Shape ranks(int32_t rank, int64_t cols = 4096) {
  Shape shape;
  shape.cols = cols;
  shape.rank = rank;
  return shape;
}
Shape with(bool Shape::*what, int64_t rows = 4096) {
  Shape shape;
  shape.rows = rows;
  shape.*what = true;
  return shape;
}

struct Row {
  Ask ask;
  nf4_dtype dtype;
  int64_t m;
  Shape shape;
  nf4_path t4, a100, l4, h200, b200, rtx5090;
};

const Row kRows[] = {
    // Few rows of x by skinny kernels; more by wgmma, or by multistage kernels up to a limit.
    {forward, kFp16, 1, {}, kFused, kFused, kFused, kFused, kFused, kFused},
    {forward, kBf16, 8, {}, kDense, kFused, kFused, kFused, kFused, kFused},
    {forward, kBf16, 9, {}, kDense, kFused, kFused, kFused, kFused, kFused},
    {forward, kBf16, 16, {}, kDense, kFused, kFused, kFused, kFused, kFused},
    {forward, kBf16, 17, {}, kDense, kFused, kFused, kFused, kDense, kFused},
    {forward, kFp16, 32, {}, kFused, kFused, kFused, kFused, kDense, kFused},
    {forward, kFp16, 64, {}, kDense, kFused, kFused, kFused, kDense, kFused},
    {forward, kFp16, 65, {}, kDense, kDense, kDense, kFused, kDense, kDense},
    {forward, kFp16, 64, sized(8192, 4096), kFused, kFused, kFused, kFused, kDense, kFused},
    {forward, kFp16, 32, sized(2048, 4096), kDense, kFused, kFused, kFused, kDense, kFused},
    {forward, kFp16, 33, sized(2048, 4096), kDense, kDense, kDense, kFused, kDense, kDense},
    {forward, kFp16, 17, sized(2048, 2048), kDense, kDense, kDense, kFused, kDense, kDense},
    {forward, kFp16, 16, sized(2048, 2048), kFused, kFused, kFused, kFused, kFused, kFused},
    {forward, kFp16, 128, sized(8192, 4096), kDense, kFused, kFused, kFused, kDense, kFused},
    {forward, kFp16, 129, sized(8192, 4096), kDense, kDense, kDense, kFused, kDense, kDense},
    {forward, kBf16, 17, with(&Shape::codebook), kDense, kFused, kFused, kFused, kDense, kFused},
    {forward, kFp16, 4096, {}, kDense, kDense, kDense, kFused, kDense, kDense},
    {forward, kFp32, 1, {}, kDense, kFused, kDense, kFused, kFused, kDense},
    {forward, kFp32, 17, {}, kDense, kDense, kDense, kDense, kDense, kDense},
    // Only mma_64x64 multiplies these, also on Hopper, and is slow even where it has little to do.
    {forward, kBf16, 1, blocks_of(32), kDense, kDense, kDense, kDense, kDense, kDense},
    {forward, kBf16, 64, sized(1024, 200), kDense, kDense, kDense, kDense, kDense, kDense},
    {forward, kBf16, 0, {}, kFused, kFused, kFused, kFused, kFused, kFused},
    // MXFP4 has the kernels of NF4, but for the gradient.
    {forward, kBf16, 16, with(&Shape::mxfp4), kDense, kFused, kFused, kFused, kFused, kFused},
    {forward, kBf16, 4096, with(&Shape::mxfp4), kDense, kDense, kDense, kFused, kDense, kDense},
    {gradient, kBf16, 16, with(&Shape::mxfp4), kDense, kDense, kDense, kDense, kDense, kDense},
    // Integers fit 99 KiB. Small groups are slow to dequantize.
    {gptq, kFp16, 1, {}, kDense, kFused, kFused, kFused, kFused, kFused},
    {gptq, kFp16, 32, {}, kFused, kFused, kFused, kFused, kDense, kFused},
    {gptq, kFp16, 64, {}, kDense, kFused, kFused, kFused, kDense, kFused},
    {awq, kFp16, 16, {}, kDense, kFused, kFused, kFused, kFused, kFused},
    {gptq, kBf16, 4, {}, kDense, kFused, kFused, kFused, kFused, kDense},
    {gptq, kBf16, 16, {}, kDense, kFused, kFused, kFused, kFused, kFused},
    {gptq, kBf16, 17, {}, kDense, kFused, kFused, kFused, kDense, kFused},
    {gptq, kBf16, 64, {}, kDense, kFused, kFused, kFused, kDense, kFused},
    {gptq, kBf16, 65, {}, kDense, kDense, kDense, kFused, kDense, kDense},
    {gptq, kBf16, 128, sized(8192, 4096), kDense, kFused, kFused, kFused, kDense, kFused},
    {gptq, kBf16, 64, groups_of(32), kDense, kFused, kFused, kFused, kFused, kFused},
    {gptq, kBf16, 257, groups_of(32), kDense, kDense, kDense, kDense, kDense, kDense},
    {gptq, kBf16, 4, with(&Shape::g_idx), kDense, kFused, kFused, kFused, kFused, kFused},
    {gptq, kBf16, 300, with(&Shape::permutation), kDense, kDense, kDense, kFused, kDense, kDense},
    // mma_64x64 alone multiplies these: GPTQ whose rows are no multiple of four.
    {gptq, kBf16, 64, sized(16386, 256), kDense, kDense, kDense, kDense, kDense, kDense},
    {gptq, kFp32, 1, {}, kDense, kDense, kDense, kDense, kDense, kDense},
    // Before Hopper AWQ has no skinny kernel.
    {awq, kBf16, 1, {}, kDense, kDense, kDense, kFused, kFused, kDense},
    {awq, kBf16, 1, sized(14336, 4096), kDense, kFused, kFused, kFused, kFused, kFused},
    {awq, kBf16, 9, {}, kDense, kFused, kFused, kFused, kFused, kFused},
    {awq, kBf16, 1, sized(2048, 512), kDense, kDense, kDense, kFused, kFused, kDense},
    {awq, kBf16, 1, sized(2048, 256), kDense, kFused, kFused, kFused, kFused, kFused},
    // The gradient: up to a limit by multistage kernels, where there is no wgmma.
    {gradient, kBf16, 1, {}, kDense, kFused, kFused, kFused, kFused, kFused},
    {gradient, kBf16, 16, {}, kDense, kFused, kFused, kFused, kFused, kFused},
    {gradient, kBf16, 16, with(&Shape::codebook), kDense, kFused, kFused, kDense, kFused, kFused},
    // Skinny kernels read scales in pairs, and no multistage kernel takes these rows.
    {gradient, kBf16, 16, with(&Shape::odd_absmax, 4104), kDense, kDense, kDense, kFused, kDense,
     kDense},
    {gradient, kFp16, 17, {}, kDense, kFused, kFused, kFused, kDense, kFused},
    {gradient, kFp16, 64, {}, kDense, kFused, kFused, kFused, kDense, kFused},
    {gradient, kFp16, 65, {}, kDense, kDense, kDense, kFused, kDense, kDense},
    {gradient, kFp16, 128, sized(8192, 4096), kDense, kFused, kFused, kFused, kDense, kFused},
    {gradient, kFp16, 129, sized(8192, 4096), kDense, kDense, kDense, kFused, kDense, kDense},
    {gradient, kFp16, 17, sized(2048, 2048), kDense, kDense, kDense, kFused, kDense, kDense},
    {gradient, kBf16, 32, ranks(17), kDense, kFused, kFused, kFused, kDense, kFused},
    {gradient, kBf16, 33, ranks(17), kDense, kDense, kDense, kFused, kDense, kDense},
    {gradient, kBf16, 64, sized(4104, 4096), kDense, kDense, kDense, kFused, kDense, kDense},
    {gradient, kBf16, 1024, {}, kDense, kDense, kDense, kFused, kDense, kDense},
    {gradient, kBf16, 1025, {}, kDense, kDense, kDense, kDense, kDense, kDense},
    {gradient, kFp32, 16, {}, kDense, kDense, kDense, kDense, kDense, kDense},
    {gradient, kFp16, 17, blocks_of(32), kDense, kDense, kDense, kDense, kDense, kDense},
    // The adapters' rows have 1.94, 1.45, 0.36, 3.88 and 5.09 waves on an H200.
    {gradient, kBf16, 2048, ranks(16), kDense, kDense, kDense, kFused, kDense, kDense},
    {gradient, kBf16, 2048, ranks(17), kDense, kDense, kDense, kDense, kDense, kDense},
    {gradient, kBf16, 1536, ranks(16), kDense, kDense, kDense, kDense, kDense, kDense},
    {gradient, kBf16, 1536, ranks(8, 1024), kDense, kDense, kDense, kFused, kDense, kDense},
    {gradient, kBf16, 4096, ranks(8), kDense, kDense, kDense, kFused, kDense, kDense},
    {gradient, kBf16, 4096, ranks(4), kDense, kDense, kDense, kDense, kDense, kDense},
    {gradient, kBf16, 1536, ranks(16, 14336), kDense, kDense, kDense, kFused, kDense, kDense},
    {gradient, kBf16, 4097, ranks(16, 14336), kDense, kDense, kDense, kDense, kDense, kDense},
    {lora_grad, kBf16, 512, ranks(64), kDense, kFused, kFused, kFused, kFused, kFused},
    {lora_grad, kBf16, 512, ranks(65), kDense, kDense, kDense, kDense, kDense, kDense},
    {lora_grad, kFp32, 512, ranks(8), kDense, kDense, kDense, kFused, kDense, kDense},
    // 4, 8, 32, 33 and 256 rows of x an expert.
    {experts, kBf16, 512, {}, kFused, kFused, kFused, kFused, kFused, kFused},
    {experts, kBf16, 1024, {}, kDense, kFused, kFused, kFused, kFused, kFused},
    {experts, kBf16, 4096, {}, kDense, kFused, kFused, kFused, kFused, kFused},
    {experts, kBf16, 4224, {}, kDense, kFused, kFused, kFused, kDense, kFused},
    {experts, kBf16, 32768, {}, kDense, kDense, kDense, kFused, kDense, kDense},
    {experts, kFp16, 4096, {}, kFused, kFused, kFused, kFused, kFused, kFused},
    {experts, kFp32, 8, {}, kDense, kDense, kDense, kDense, kDense, kDense},
    {experts_gradient, kBf16, 512, {}, kFused, kFused, kFused, kFused, kFused, kFused},
    {experts_gradient, kBf16, 32768, {}, kDense, kDense, kDense, kFused, kDense, kDense},
    // Half a row of an expert in MXFP4, and one more in all.
    {experts, kBf16, 32768, with(&Shape::mxfp4), kDense, kDense, kDense, kFused, kDense, kDense},
    {experts_gradient, kBf16, 64, with(&Shape::mxfp4), kFused, kFused, kFused, kFused, kFused,
     kFused},
    {experts_gradient, kBf16, 65, with(&Shape::mxfp4), kDense, kDense, kDense, kDense, kDense,
     kDense},
    {int4_experts, kFp16, 512, {}, kFused, kFused, kFused, kFused, kFused, kFused},
    {int4_experts, kFp16, 8, with(&Shape::g_idx), kDense, kDense, kDense, kDense, kDense, kDense},
};

nf4_path expected(const Row &row, const Gpu &gpu) {
  // A build without the kernels of a B200 has those of an A100 as PTX. torch's dense products are
  // those of a B200.
  const char *const family = nf4::cuda::family_for(gpu.compute_capability)->name;
  if (gpu.compute_capability == kB200.compute_capability && std::strcmp(family, "sm80") == 0)
    return row.ask == experts || row.ask == forward || row.ask == gptq || row.ask == gradient
               ? row.b200
               : row.a100;
  if (gpu.compute_capability == kRtx5090.compute_capability && std::strcmp(family, "sm80") == 0)
    return row.l4;
  switch (gpu.compute_capability) {
    case kT4.compute_capability:
      return row.t4;
    case kA100.compute_capability:
      return row.a100;
    case kL4.compute_capability:
      return row.l4;
    case kH200.compute_capability:
      return row.h200;
    case kB200.compute_capability:
      return row.b200;
    default:
      return row.rtx5090;
  }
}

}  // namespace

// Earlier calls may leave such bytes below the caller's frame: addresses that are aligned or not.
[[gnu::noinline]] void leave_on_stack(uint8_t byte) {
  constexpr size_t kBytes = 16 << 10;
  [[maybe_unused]] volatile uint8_t below[kBytes];
  for (size_t i = 0; i < kBytes; ++i) below[i] = byte;
}

TEST_CASE("each GPU goes the way that is expected to be faster", "[standin]") {
  std::string found;
  for (const Gpu &gpu : gpus()) {
    found += in_child([&]() -> std::string {
      set_gpus({gpu});
      std::string wrong;
      for (const Row &row : kRows)
        for (const uint8_t left : {0x00, 0x55}) {
          nf4_path path = 0;
          leave_on_stack(left);
          const nf4_status status = row.ask(row.dtype, row.m, row.shape, &path);
          if (status == NF4_STATUS_OK && path == expected(row, gpu)) continue;
          wrong += "row " + std::to_string(&row - kRows) + " on " +
                   std::to_string(gpu.compute_capability) + ": " + std::to_string(path) + ", " +
                   (status == NF4_STATUS_OK ? "" : nf4_last_error()) + "\n";
        }
      nf4_device info{};
      info.struct_size = sizeof info;
      const bool timed = gpu.compute_capability == kH200.compute_capability;
      if (nf4_device_info(0, &info) != NF4_STATUS_OK || info.timed != (timed ? 1 : 0) ||
          info.shared_memory_bytes != gpu.shared_bytes)
        wrong += "nf4_device_info\n";
      return wrong;
    });
  }
  CHECK(found == "");
}

// nf4 doctor prints these: for a weight of 4096 x 4096 in fp16, the fewest and the most rows of x
// that libnf4's kernels take (fused_from and fused_rows of bindings/python/nf4/_paths.py); 0 where
// they take none.
TEST_CASE("rows of x that libnf4's kernels take, on each GPU", "[standin]") {
  struct Rows {
    int64_t fewest, most;
  };
  struct OfGpu {
    Gpu gpu;
    const char *family;
    Rows codes, integers;
  };
  constexpr OfGpu kOfGpus[] = {
      {kT4, "sm75", {1, 32}, {9, 32}},      {kA100, "sm80", {1, 64}, {1, 64}},
      {kL4, "sm80", {1, 64}, {1, 64}},      {kH200, "sm90", {1, 4096}, {1, 4096}},
      {kB200, "sm90", {1, 16}, {1, 16}},    {kB200, "sm80", {1, 16}, {1, 16}},
      {kRtx5090, "sm90", {1, 64}, {1, 64}}, {kRtx5090, "sm80", {1, 64}, {1, 64}},
  };
  const auto fused = [](Ask ask, int64_t m) {
    nf4_path path = kDense;
    return ask(kFp16, m, {}, &path) == NF4_STATUS_OK && path == kFused;
  };
  const auto rows_of = [&](Ask ask) {
    int64_t fewest = 1;
    while (fewest < 4096 && !fused(ask, fewest)) ++fewest;
    for (const int64_t most : {4096, 1024, 256, 128, 64, 32, 16, 8, 4, 2, 1})
      if (fused(ask, most)) return Rows{fewest, most};
    return Rows{0, 0};
  };
  const auto text = [](const Rows &codes, const Rows &integers) {
    return std::to_string(codes.fewest) + " to " + std::to_string(codes.most) + ", integers " +
           std::to_string(integers.fewest) + " to " + std::to_string(integers.most);
  };
  for (const OfGpu &each : kOfGpus) {
    const auto *const family = nf4::cuda::family_for(each.gpu.compute_capability);
    if (family == nullptr || std::strcmp(family->name, each.family) != 0) continue;
    INFO("compute capability " << each.gpu.compute_capability << ", " << each.family);
    CHECK(in_child([&] {
            set_gpus({each.gpu});
            return text(rows_of(forward), rows_of(gptq));
          }) == text(each.codes, each.integers));
  }
}

TEST_CASE("costs of this GPU decide, and those of another do not", "[standin]") {
  for (const Gpu &gpu : gpus())
    CHECK(in_child([&]() -> std::string {
            set_gpus({gpu});
            nf4_device info{};
            info.struct_size = sizeof info;
            if (nf4_device_info(0, &info) != NF4_STATUS_OK) return nf4_last_error();
            const auto set = [&](const std::string &name, const std::string &rows) {
              const std::string text =
                  "nf4-costs 1 " + std::string(nf4_version_string()) + "\ngpu " +
                  std::to_string(info.compute_capability) + " " + info.dequant_variant + " " +
                  std::to_string(info.multiprocessors) + " " +
                  std::to_string(info.shared_memory_bytes) + " " +
                  std::to_string(info.driver_version) + " " + name + "\n" + rows + "end\n";
              return nf4_set_costs(text.data(), text.size());
            };
            const auto path_of = [](Ask ask, nf4_dtype dtype, int64_t m) {
              nf4_path path = 0;
              return ask(dtype, m, {}, &path) == NF4_STATUS_OK ? path : 0;
            };
            const std::string slow = "codebook fp16 mma 1 9 0 0 0\ncodebook fp16 dense 1 8 0 0 0\n";
            const std::string fast =
                "codebook fp16 mma 1 9 0 0 0\ncodebook fp16 dense 1 9 0 0 0\n"
                "gradient fp16 mma 1 1 0 0 0\ngradient fp16 dense 1 9 0 0 0\n"
                "gptq bf16 mma 1 1 0 0 0\ngptq bf16 dense 1 9 0 0 0\n";
            std::string wrong;
            const nf4_path before = path_of(forward, kFp16, 64);
            for (const std::string &rows : {slow, fast})
              if (set("another", rows) != NF4_STATUS_OK || path_of(forward, kFp16, 64) != before)
                wrong += "another GPU\n";
            if (set(info.name, slow) != NF4_STATUS_OK || path_of(forward, kFp16, 1) != kDense ||
                path_of(forward, kFp16, 64) != kDense)
              wrong += "slow\n";
            if (set(info.name, fast) != NF4_STATUS_OK || path_of(forward, kFp16, 64) != kFused ||
                path_of(forward, kFp16, 4096) != kFused ||
                path_of(gradient, kFp16, 4096) != kFused || path_of(gptq, kBf16, 4096) != kFused)
              wrong += "fast\n";
            if (nf4_set_costs(nullptr, 0) != NF4_STATUS_OK || path_of(forward, kFp16, 64) != before)
              wrong += "removed\n";
            return wrong;
          }) == "");
}
