// Arguments: each wrong one gives a status and a detail that names it, and no byte is written.
// Launches check them before they call a driver, so no GPU is needed.
#include <climits>
#include <cstring>
#include <string>
#include <vector>

#include "nf4/nf4.h"
#include "support/call.hpp"
#include "support/catch.hpp"
#include "support/guarded.hpp"

using namespace nf4::test;

namespace {

// The parts of a weight of any kind, and the other arguments of dequantize and quantize.
template <class Call>
std::vector<Fault<Call>> common_faults() {
  const std::string tensor = Call::kTensor, size = tensor + ".struct_size is ";
  const size_t later = sizeof(Call::tensor) + 8;
  return {
      {kAll, [](Call &c) { c.weight = nullptr; }, "the " + tensor + " is NULL"},
      {kAll, [](Call &c) { c.tensor.struct_size = 0; }, size + "0"},
      {kAll, [](Call &c) { c.tensor.struct_size += 8; }, size + std::to_string(later)},
      {kAll, [](Call &c) { c.tensor.rows = -1; }, "rows is -1"},
      {kAll, [](Call &c) { c.tensor.cols = -1; }, "cols is -1"},
      {kAll, [](Call &c) { c.tensor.rows = c.tensor.cols = -5; }, "rows is -5"},
      {kAll, [](Call &c) { c.tensor.rows = c.tensor.cols = int64_t{1} << 32; },
       "rows * cols is 4294967296 * 4294967296"},
      {kAll, [](Call &c) { c.tensor.packed = nullptr; }, "packed is NULL"},
      {kCpu, [](Call &c) { c.threads = -1; }, "threads is -1; expected 0 or more"},
      {kDequant, [](Call &c) { c.dense = nullptr; }, "out is NULL"},
      {kQuantize, [](Call &c) { c.dense = nullptr; }, "in is NULL"},
      {kDequant, [](Call &c) { c.dtype = 0; }, "out_dtype is 0"},
      {kQuantize, [](Call &c) { c.dtype = 4; }, "in_dtype is 4"},
      {kDequant, [](Call &c) { c.dense = moved(c.dense, 2); },
       "out is 0x; expected a multiple of 4"},
      {kQuantize, [](Call &c) { c.dense = moved(c.dense, 2); },
       "in is 0x; expected a multiple of 4"},
      {kDequant,
       [](Call &c) {
         c.dtype = NF4_DTYPE_BF16;
         c.dense = moved(c.dense, 1);
       },
       "out is 0x; expected a multiple of 2"},
      {kDequant, [](Call &c) { c.tensor.packed = moved(c.dense, Call::kDenseBytes - 4); },
       "packed overlaps out"},
      {kQuantize, [](Call &c) { c.tensor.packed = c.dense; }, "in overlaps packed"},
  };
}

const std::vector<Fault<Call>> kFaults = {
    {kAll, [](Call &c) { c.tensor.scale_rule = 1; }, "scale_rule is 1"},
    {kAll,
     [](Call &c) {
       c.tensor.rows = (int64_t{1} << 60) + 1;
       c.tensor.cols = 1;
     },
     "rows * cols is 1152921504606846977 * 1"},
    // The last byte of out.
    {kDequant, [](Call &c) { c.tensor.packed = moved(c.dense, Call::kDenseBytes - 1); },
     "packed overlaps out"},
    {kAll, [](Call &c) { c.tensor.absmax = nullptr; }, "absmax is NULL"},
    {kQuantize | kNested, [](Call &c) { c.workspace = nullptr; }, "workspace is NULL"},
    {kNested, [](Call &c) { c.tensor.nested_absmax = nullptr; },
     "nested_absmax is NULL, but nested_blocksize is 2"},
    {kNested, [](Call &c) { c.tensor.nested_code = nullptr; },
     "nested_code is NULL, but nested_blocksize is 2"},
    {kNested, [](Call &c) { c.tensor.nested_offset = nullptr; },
     "nested_offset is NULL, but nested_blocksize is 2"},
    {kFlat, [](Call &c) { c.tensor.nested_absmax = floats(c.nested_absmax); },
     "nested_absmax is not NULL, but nested_blocksize is 0 (flat)"},
    {kFlat, [](Call &c) { c.tensor.nested_code = floats(c.nested_code); },
     "nested_code is not NULL, but nested_blocksize is 0 (flat)"},
    {kFlat, [](Call &c) { c.tensor.nested_offset = floats(c.nested_offset); },
     "nested_offset is not NULL, but nested_blocksize is 0 (flat)"},
    {kFlat,
     [](Call &c) {
       c.tensor.format = NF4_FORMAT_NVFP4;
       c.tensor.blocksize = c.tensor.cols = 16;
     },
     "nested_absmax is NULL, but format is 4 (NVFP4)"},
    {kFlat,
     [](Call &c) {
       c.tensor.format = NF4_FORMAT_MXFP4;
       c.tensor.blocksize = c.tensor.cols = 32;
       c.tensor.codebook = floats(c.codebook);
     },
     "codebook is not NULL, but format is 3 (MXFP4)"},
    {kAll, [](Call &c) { c.tensor.format = 0; }, "format is 0"},
    {kAll, [](Call &c) { c.tensor.format = 5; }, "format is 5"},
    {kAll, [](Call &c) { c.tensor.blocksize = 0; }, "blocksize is 0"},
    {kAll, [](Call &c) { c.tensor.blocksize = -64; }, "blocksize is -64"},
    {kAll, [](Call &c) { c.tensor.blocksize = INT_MIN; }, "blocksize is -2147483648"},
    {kAll, [](Call &c) { c.tensor.blocksize = 96; }, "blocksize is 96"},
    {kAll, [](Call &c) { c.tensor.blocksize = 16; }, "blocksize is 16"},
    {kAll, [](Call &c) { c.tensor.blocksize = 8192; }, "blocksize is 8192"},
    {kNested, [](Call &c) { c.tensor.nested_blocksize = -1; }, "nested_blocksize is -1"},
    {kNested, [](Call &c) { c.tensor.nested_blocksize = 3; }, "nested_blocksize is 3"},
    {kNested, [](Call &c) { c.tensor.nested_blocksize = INT_MIN; },
     "nested_blocksize is -2147483648"},
    {kFlat, [](Call &c) { c.tensor.absmax = moved(c.tensor.absmax, 1); },
     "absmax is 0x; expected a multiple of 4"},
    {kNested, [](Call &c) { c.tensor.nested_absmax = moved(c.tensor.nested_absmax, 2); },
     "nested_absmax is 0x; expected a multiple of 4"},
    {kNested, [](Call &c) { c.tensor.nested_code = moved(c.tensor.nested_code, 2); },
     "nested_code is 0x; expected a multiple of 4"},
    {kNested, [](Call &c) { c.tensor.nested_offset = moved(c.tensor.nested_offset, 1); },
     "nested_offset is 0x; expected a multiple of 4"},
    {kAll, [](Call &c) { c.tensor.codebook = moved(floats(c.codebook), 1); },
     "codebook is 0x; expected a multiple of 4"},
    {kQuantize | kNested, [](Call &c) { c.workspace = moved(c.workspace, 8); },
     "workspace is 0x; expected a multiple of 16"},
    {kQuantize | kNested, [](Call &c) { c.workspace_bytes = 39; },
     "workspace_bytes is 39; expected at least 40"},
    {kDequant, [](Call &c) { c.tensor.absmax = moved(c.dense, 4); }, "absmax overlaps out"},
    {kDequant | kNested, [](Call &c) { c.tensor.nested_code = static_cast<float *>(c.dense); },
     "nested_code overlaps out"},
    {kDequant, [](Call &c) { c.tensor.codebook = static_cast<float *>(c.dense); },
     "codebook overlaps out"},
    {kQuantize | kNested,
     [](Call &c) { c.tensor.absmax = moved(c.tensor.packed, Call::kPackedBytes - 1); },
     "packed overlaps absmax"},
    {kQuantize | kNested, [](Call &c) { c.workspace = c.dense; }, "in overlaps workspace"},
    {kQuantize | kNested, [](Call &c) { c.tensor.nested_offset = c.tensor.nested_absmax + 2; },
     "nested_absmax overlaps nested_offset"},
    {kQuantize | kNested, [](Call &c) { c.tensor.packed = c.nested_code.data() + 1000; },
     "packed overlaps nested_code"},
};

}  // namespace

TEMPLATE_TEST_CASE("a bad argument is named, and nothing is written", "[api]", Call, Int4Call) {
  check_faults(common_faults<TestType>());
}

TEST_CASE("a bad argument of a codebook weight is named, and nothing is written", "[api]") {
  check_faults(kFaults);
}

TEMPLATE_TEST_CASE("the calls that the tables break are right", "[api]", Call, Int4Call) {
  // A bias of poison would hide the tiny products of poison.
  check_right_calls<TestType>([](TestType &c) { c.args.bias = nullptr; });
}

TEST_CASE("packed and nested absmax may lie at any byte", "[api]") {
  for (int shift = 0; shift < 16; ++shift) {
    Call call(kNested);
    const GuardedBuffer packed(Call::kPackedBytes, Edge::kStart, shift);
    const GuardedBuffer absmax(5, Edge::kStart, shift);
    call.tensor.packed = packed.data();
    call.tensor.absmax = absmax.data();
    CHECK(nf4_quantize_cpu(call.dense, call.dtype, call.weight, call.workspace,
                           call.workspace_bytes, 1) == NF4_STATUS_OK);
    CHECK(nf4_dequant_cpu(call.weight, call.dense, call.dtype, 1) == NF4_STATUS_OK);
  }
}

TEST_CASE("inputs may share memory", "[api]") {
  Call call(kFlat);
  std::memset(call.absmax.data(), 0, call.absmax.size());
  call.tensor.packed = call.absmax.data();
  call.tensor.cols = 1;
  CHECK(nf4_dequant_cpu(call.weight, call.dense, call.dtype, 1) == NF4_STATUS_OK);
}

TEST_CASE("what would go beyond the last address overlaps what is before it", "[api]") {
  Call call(kFlat);
  call.tensor.rows = 1 << 20;
  call.dense = reinterpret_cast<void *>(UINTPTR_MAX - 4095);  // 4 KiB of more than 400 MB
  for (const uintptr_t last : {64, 4, 1}) {
    call.tensor.packed = reinterpret_cast<void *>(UINTPTR_MAX - last);
    CHECK(nf4_dequant_cpu(call.weight, call.dense, call.dtype, 1) == NF4_STATUS_INVALID_ARGUMENT);
    CHECK(nf4_last_error() == std::string("packed overlaps out"));
  }
}
