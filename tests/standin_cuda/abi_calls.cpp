#include "standin_cuda/abi_calls.hpp"

#include <algorithm>

#include "standin_cuda/call_builder.hpp"

namespace nf4::test::standin {
namespace {

constexpr nf4_dtype kFp32 = NF4_DTYPE_FP32, kFp16 = NF4_DTYPE_FP16, kBf16 = NF4_DTYPE_BF16;
constexpr nf4_int4_layout kLayouts[] = {NF4_INT4_GPTQ, NF4_INT4_AWQ, NF4_INT4_COMPRESSED_TENSORS};

// Of models, of few columns or many, and any.
int64_t random_side(Rng &rng) {
  if (rng.one_in(2)) return rng.pick({512, 1024, 2880, 4096, 5120, 11008, 14336, 28672});
  if (rng.one_in(3)) return 64 * rng.between(1, 512);
  return rng.one_in(8) ? rng.between(1, 300000) : rng.between(1, 3000);
}

int64_t random_m(Rng &rng) {
  return rng.between(1, rng.pick({2, 2, 20, 100, 400, 2000, 10000, 100000}));
}

}  // namespace

std::vector<AbiCall> all_calls(const Memory &memory) {
  CallBuilder calls(memory);
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
      for (const int rank : {8, 33, 64}) calls.lora_grad(kBf16, size, m, rank);
      calls.lora_grad(kFp32, size, m, 16);
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
  CallBuilder calls(memory);
  calls.dequant(kBf16, kSize, true);
  calls.quantize(kBf16, kSize, false);
  calls.quantize(kBf16, {4096, 14336}, true);
  for (const int rank : {0, 8, 33})
    for (const int64_t m : {1, 300}) {
      calls.matmul(kBf16, kSize, true, m, rank, false);
      calls.matmul(kBf16, kSize, true, m, rank, true);
    }
  calls.matmul(kBf16, {14336, 4096}, true, 2048, 0, false);
  calls.lora_grad(kBf16, kSize, 512, 16);
  calls.batch(kBf16, kSize, 1, 3);
  calls.batch(kBf16, kSize, 300, 2);
  for (const int64_t m : {8, 4096}) {
    calls.grouped(kBf16, kExperts, 8, m, true, false);
    calls.grouped(kBf16, kExperts, 8, m, false, true);
    calls.int4_grouped(NF4_INT4_AWQ, kExperts, 8, m, true);
  }
  calls.int4_grouped(NF4_INT4_GPTQ, kExperts, 8, 8, true);
  calls.int4_dequant(NF4_INT4_AWQ, kFp16, kSize, false);
  calls.int4_quantize(NF4_INT4_GPTQ, kFp16, kSize);
  calls.int4_reorder(NF4_INT4_GPTQ, kSize);
  for (const nf4_int4_layout layout : kLayouts)
    for (const int64_t m : {1, 300}) calls.int4_matmul(layout, kFp16, kSize, m, m > 1);
  calls.int4_matmul(NF4_INT4_GPTQ, kFp16, kSize, 1, true);
  calls.int4_batch(NF4_INT4_GPTQ, kSize, 1, 3);
  return calls.list;
}

AbiCall random_call(uint64_t number, const Memory &memory) {
  Rng rng(0x7700000000 + number);
  CallBuilder calls(memory, &rng);
  const nf4_dtype dtype16 = rng.pick({kFp16, kBf16}), dtype = rng.one_in(4) ? kFp32 : dtype16;
  const nf4_int4_layout layout = rng.pick(kLayouts);
  const bool nested = rng.one_in(2), gradient = rng.one_in(2), index = rng.one_in(2);
  const int64_t m = random_m(rng);
  Size size{random_side(rng), random_side(rng)};
  // What the layouts ask for, and what experts do.
  const Size eights{(size.rows + 7) / 8 * 8, (size.cols + 7) / 8 * 8};
  const Size expert{std::min<int64_t>(eights.rows, 8192), std::min<int64_t>(eights.cols, 8192) * 4};
  const int experts = static_cast<int>(rng.between(1, 130));
  const int rank = rng.one_in(2) ? 0 : static_cast<int>(rng.between(1, 128));
  switch (rng.below(13)) {
    case 0:
      calls.dequant(dtype, size, nested);
      break;
    case 1:
      calls.quantize(dtype, size, nested);
      break;
    case 2:
      calls.matmul(dtype, size, nested, dtype == kFp32 ? 1 + m % 16 : m, rank, false);
      break;
    case 3:
      calls.matmul(dtype, size, nested, m, rank, true);
      break;
    case 4:
      calls.batch(dtype16, size, m, static_cast<int>(rng.between(1, 9)));
      break;
    case 5:
      calls.grouped(dtype16, expert, experts, m, index, gradient);
      break;
    case 6:
      calls.int4_dequant(layout, dtype, eights, nested);
      break;
    case 7:
      calls.int4_quantize(layout, dtype, eights);
      break;
    case 8:
      calls.int4_reorder(layout, eights);
      break;
    case 9:
      calls.int4_batch(layout, eights, m, static_cast<int>(rng.between(1, 9)));
      break;
    case 10:
      calls.int4_grouped(layout, expert, experts, m, index);
      break;
    case 11:
      calls.lora_grad(dtype, size, m, std::max(rank, 1));
      break;
    default:
      calls.int4_matmul(layout, dtype16, eights, m, index);
  }
  AbiCall call = calls.list.front();
  call.what += words(", number %llu", static_cast<unsigned long long>(number));
  return call;
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
