// Arguments of the functions of integer weights: each wrong one gives a status and a detail that
// names it, and no byte is written.
#include <climits>
#include <cstring>
#include <string>
#include <vector>

#include "nf4/nf4.h"
#include "support/call.hpp"
#include "support/catch.hpp"
#include "support/int4_call.hpp"

using namespace nf4::test;

namespace {

constexpr int64_t kBig = int64_t{1} << 32;

// A field of the weight, which every function looks at.
const std::vector<Int4Fault> kFields = {
    {"no weight",
     kAny,
     kGptq,
     [](Int4Call &c) { c.weight = nullptr; },
     {"nf4_int4_tensor", "NULL"}},
    {"struct_size 0",
     kAny,
     kGptq,
     [](Int4Call &c) { c.tensor.struct_size = 0; },
     {"struct_size is 0"}},
    {"struct_size of a later version",
     kAny,
     kAwq,
     [](Int4Call &c) { c.tensor.struct_size += 8; },
     {"nf4_int4_tensor.struct_size", std::to_string(sizeof(nf4_int4_tensor) + 8)}},
    {"layout 0", kAny, kGptq, [](Int4Call &c) { c.tensor.layout = 0; }, {"layout is 0"}},
    {"layout 4", kAny, kGptq, [](Int4Call &c) { c.tensor.layout = 4; }, {"layout is 4"}},
    {"layout -1", kAny, kGptq, [](Int4Call &c) { c.tensor.layout = -1; }, {"layout is -1"}},
    {"scales of fp32",
     kAny,
     kCompressed,
     [](Int4Call &c) { c.tensor.scales_dtype = 1; },
     {"scales_dtype is 1"}},
    {"scales of no dtype",
     kAny,
     kGptq,
     [](Int4Call &c) { c.tensor.scales_dtype = 0; },
     {"scales_dtype is 0"}},
    {"scales of dtype 4",
     kAny,
     kAwq,
     [](Int4Call &c) { c.tensor.scales_dtype = 4; },
     {"scales_dtype is 4"}},
    {"group_size 0",
     kAny,
     kGptq,
     [](Int4Call &c) { c.tensor.group_size = 0; },
     {"group_size is 0"}},
    {"group_size -2",
     kAny,
     kAwq,
     [](Int4Call &c) { c.tensor.group_size = -2; },
     {"group_size is -2"}},
    {"group_size -2^31",
     kAny,
     kCompressed,
     [](Int4Call &c) { c.tensor.group_size = INT_MIN; },
     {"group_size is -2147483648"}},
    {"group_size 4",
     kAny,
     kCompressed,
     [](Int4Call &c) { c.tensor.group_size = 4; },
     {"group_size is 4"}},
    {"group_size 20",
     kAny,
     kGptq,
     [](Int4Call &c) { c.tensor.group_size = 20; },
     {"group_size is 20"}},
    {"a group_size that does not divide",
     kAny,
     kGptq,
     [](Int4Call &c) { c.tensor.group_size = 48; },
     {"group_size is 48", "64"}},
    {"a group_size larger than cols",
     kAny,
     kCompressed,
     [](Int4Call &c) { c.tensor.group_size = 128; },
     {"group_size is 128", "64"}},
    {"zero_offset 2",
     kAny,
     kGptq,
     [](Int4Call &c) { c.tensor.zero_offset = 2; },
     {"zero_offset is 2"}},
    {"zero_offset -1",
     kAny,
     kGptq,
     [](Int4Call &c) { c.tensor.zero_offset = -1; },
     {"zero_offset is -1"}},
    {"zero_offset in AWQ",
     kAny,
     kAwq,
     [](Int4Call &c) { c.tensor.zero_offset = 1; },
     {"zero_offset is 1"}},
    {"zero_offset in compressed-tensors",
     kAny,
     kCompressed,
     [](Int4Call &c) { c.tensor.zero_offset = 1; },
     {"zero_offset is 1"}},
    {"zero_offset of no zeros",
     kAny,
     kGptq,
     [](Int4Call &c) {
       c.tensor.zero_offset = 1;
       c.tensor.zeros = nullptr;
     },
     {"zero_offset is 1", "zeros is NULL"}},
    {"rows -1", kAny, kGptq, [](Int4Call &c) { c.tensor.rows = -1; }, {"rows is -1"}},
    {"cols -1", kAny, kCompressed, [](Int4Call &c) { c.tensor.cols = -1; }, {"cols is -1"}},
    {"rows * cols beyond int64",
     kAny,
     kGptq,
     [](Int4Call &c) { c.tensor.rows = c.tensor.cols = kBig; },
     {"rows * cols", "4294967296"}},
    {"cols that are no words",
     kAny,
     kGptq,
     [](Int4Call &c) {
       c.tensor.cols = 60;
       c.tensor.group_size = -1;
     },
     {"cols is 60", "GPTQ"}},
    {"rows that are no words",
     kAny,
     kAwq,
     [](Int4Call &c) { c.tensor.rows = 12; },
     {"rows is 12", "AWQ"}},
};

// A pointer of the weight.
const std::vector<Int4Fault> kPointers = {
    {"no packed", kAny, kGptq, [](Int4Call &c) { c.tensor.packed = nullptr; }, {"packed is NULL"}},
    {"no scales", kAny, kAwq, [](Int4Call &c) { c.tensor.scales = nullptr; }, {"scales is NULL"}},
    {"misaligned packed",
     kAny,
     kGptq,
     [](Int4Call &c) { c.tensor.packed = moved(c.tensor.packed, 2); },
     {"packed", "multiple of 4"}},
    {"misaligned scales",
     kAny,
     kCompressed,
     [](Int4Call &c) { c.tensor.scales = moved(c.tensor.scales, 1); },
     {"scales", "multiple of 2"}},
    {"misaligned zeros",
     kAny,
     kGptq,
     [](Int4Call &c) { c.tensor.zeros = moved(c.tensor.zeros, 2); },
     {"zeros", "multiple of 4"}},
    {"misaligned g_idx",
     kDequantize | kMultiply,
     kGptq,
     [](Int4Call &c) { c.tensor.g_idx = moved(Int4Call::integers(c.g_idx), 2); },
     {"g_idx", "multiple of 4"}},
    {"misaligned permutation",
     kDequantize | kMultiply,
     kAwq,
     [](Int4Call &c) { c.tensor.permutation = moved(Int4Call::integers(c.permutation), 1); },
     {"permutation", "multiple of 4"}},
};

const std::vector<Int4Fault> kDense = {
    {"negative threads", kAny, kGptq, [](Int4Call &c) { c.threads = -1; }, {"threads is -1"}},
    {"no out", kDequantize, kGptq, [](Int4Call &c) { c.out = nullptr; }, {"out is NULL"}},
    {"no in", kQuantizing, kGptq, [](Int4Call &c) { c.out = nullptr; }, {"in is NULL"}},
    {"no such out_dtype", kDequantize, kAwq, [](Int4Call &c) { c.dtype = 0; }, {"out_dtype is 0"}},
    {"no such in_dtype", kQuantizing, kAwq, [](Int4Call &c) { c.dtype = 4; }, {"in_dtype is 4"}},
    {"misaligned out",
     kDequantize,
     kCompressed,
     [](Int4Call &c) { c.out = moved(c.out, 2); },
     {"out", "multiple of 4"}},
    {"misaligned in",
     kQuantizing,
     kCompressed,
     [](Int4Call &c) { c.out = moved(c.out, 2); },
     {"in", "multiple of 4"}},
    {"out overlaps packed",
     kDequantize,
     kGptq,
     [](Int4Call &c) { c.tensor.packed = moved(c.out, kInt4OutBytes - 4); },
     {"packed overlaps out"}},
    {"out overlaps scales",
     kDequantize,
     kAwq,
     [](Int4Call &c) { c.tensor.scales = c.out; },
     {"scales overlaps out"}},
    {"out overlaps zeros",
     kDequantize,
     kCompressed,
     [](Int4Call &c) { c.tensor.zeros = c.out; },
     {"zeros overlaps out"}},
    {"out overlaps g_idx",
     kDequantize,
     kGptq,
     [](Int4Call &c) { c.tensor.g_idx = static_cast<int32_t *>(c.out); },
     {"g_idx overlaps out"}},
    {"out overlaps permutation",
     kDequantize,
     kGptq,
     [](Int4Call &c) { c.tensor.permutation = static_cast<int32_t *>(c.out); },
     {"permutation overlaps out"}},
    {"symmetric 2", kQuantizing, kGptq, [](Int4Call &c) { c.symmetric = 2; }, {"symmetric is 2"}},
    {"symmetric -1",
     kQuantizing,
     kCompressed,
     [](Int4Call &c) { c.symmetric = -1; },
     {"symmetric is -1"}},
    {"asymmetric without zeros",
     kQuantizing,
     kCompressed,
     [](Int4Call &c) { c.tensor.zeros = nullptr; },
     {"zeros is NULL", "symmetric is 0"}},
    {"quantize with g_idx",
     kQuantizing,
     kGptq,
     [](Int4Call &c) { c.tensor.g_idx = Int4Call::integers(c.g_idx); },
     {"g_idx is not NULL"}},
    {"quantize with a permutation",
     kQuantizing,
     kAwq,
     [](Int4Call &c) { c.tensor.permutation = Int4Call::integers(c.permutation); },
     {"permutation is not NULL"}},
    {"packed overlaps in",
     kQuantizing,
     kGptq,
     [](Int4Call &c) { c.tensor.packed = c.out; },
     {"in overlaps packed"}},
    {"scales overlap in",
     kQuantizing,
     kCompressed,
     [](Int4Call &c) { c.tensor.scales = c.out; },
     {"in overlaps scales"}},
    {"scales overlap packed",
     kQuantizing,
     kGptq,
     [](Int4Call &c) { c.tensor.scales = moved(c.tensor.packed, kInt4CodeBytes - 2); },
     {"packed overlaps scales"}},
    {"zeros overlap scales",
     kQuantizing,
     kAwq,
     [](Int4Call &c) { c.tensor.zeros = moved(c.tensor.scales, kInt4ScaleBytes - 4); },
     {"scales overlaps zeros"}},
};

const std::vector<Int4Fault> kReordering = {
    {"no `to`",
     kReorder,
     kGptq,
     [](Int4Call &c) { c.target = nullptr; },
     {"nf4_int4_tensor is NULL"}},
    {"no g_idx", kReorder, kGptq, [](Int4Call &c) { c.with_g_idx = false; }, {"`from`", "g_idx"}},
    {"a weight that has been reordered",
     kReorder,
     kAwq,
     [](Int4Call &c) { c.tensor.permutation = Int4Call::integers(c.permutation); },
     {"`from`", "permutation"}},
    {"`to` with g_idx",
     kReorder,
     kCompressed,
     [](Int4Call &c) { c.to.g_idx = Int4Call::integers(c.g_idx); },
     {"g_idx of `to`"}},
    {"`to` without permutation",
     kReorder,
     kGptq,
     [](Int4Call &c) { c.to.permutation = nullptr; },
     {"permutation of `to` is NULL"}},
    {"`to` without packed",
     kReorder,
     kGptq,
     [](Int4Call &c) { c.to.packed = nullptr; },
     {"packed of `to` is NULL"}},
    {"`to` of another struct_size",
     kReorder,
     kGptq,
     [](Int4Call &c) { c.to.struct_size -= 8; },
     {"struct_size"}},
    {"`to` of another layout",
     kReorder,
     kGptq,
     [](Int4Call &c) { c.to.layout = kAwq; },
     {"`to` differs"}},
    {"`to` of other groups",
     kReorder,
     kGptq,
     [](Int4Call &c) { c.to.group_size = -1; },
     {"`to` differs"}},
    {"`to` of other rows", kReorder, kAwq, [](Int4Call &c) { c.to.rows = 8; }, {"`to` differs"}},
    {"`to` of other columns",
     kReorder,
     kCompressed,
     [](Int4Call &c) { c.to.cols = 32; },
     {"`to` differs"}},
    {"`to` of another scales_dtype",
     kReorder,
     kGptq,
     [](Int4Call &c) { c.to.scales_dtype = NF4_DTYPE_BF16; },
     {"`to` differs"}},
    {"`to` of another zero_offset",
     kReorder,
     kGptq,
     [](Int4Call &c) { c.to.zero_offset = 1; },
     {"`to` differs"}},
    {"`to` without zeros",
     kReorder,
     kGptq,
     [](Int4Call &c) { c.to.zeros = nullptr; },
     {"`to` differs"}},
    {"misaligned permutation of `to`",
     kReorder,
     kGptq,
     [](Int4Call &c) { c.to.permutation = moved(c.to.permutation, 2); },
     {"permutation of `to`", "multiple of 4"}},
    {"misaligned packed of `to`",
     kReorder,
     kAwq,
     [](Int4Call &c) { c.to.packed = moved(c.to.packed, 1); },
     {"packed of `to`", "multiple of 4"}},
    {"in place",
     kReorder,
     kGptq,
     [](Int4Call &c) { c.to.packed = c.tensor.packed; },
     {"packed overlaps packed of `to`"}},
    {"the permutation in g_idx",
     kReorder,
     kGptq,
     [](Int4Call &c) { c.to.permutation = Int4Call::integers(c.g_idx); },
     {"g_idx overlaps permutation of `to`"}},
    {"packed of `to` in the scales",
     kReorder,
     kGptq,
     [](Int4Call &c) { c.to.packed = c.tensor.scales; },
     {"scales overlaps packed of `to`"}},
};

}  // namespace

TEST_CASE("a bad integer weight is named, and nothing is written", "[api]") {
  check_faults(kFields);
  check_faults(kPointers);
}

TEST_CASE("a bad argument beside an integer weight is named, and nothing is written", "[api]") {
  std::vector<Int4Fault> on_cpu = kDense;
  // Launches take no number of threads.
  check_faults({on_cpu.begin() + 1, on_cpu.end()});
  check_faults(kReordering);
  for (const Int4Function &function : int4_functions()) {
    if (function.launches) continue;
    INFO(function.name);
    Int4Call call(kGptq);
    on_cpu.front().change(call);
    CHECK(function.call(call) == NF4_STATUS_INVALID_ARGUMENT);
    CHECK(nf4_last_error() == std::string("threads is -1; expected 0 or more"));
    CHECK(call.untouched());
  }
}

TEST_CASE("the calls of integer weights that the tables break are right", "[api]") {
  for (const nf4_int4_layout layout : {kGptq, kAwq, kCompressed})
    for (const Int4Function &function : int4_functions()) {
      INFO(function.name << ", layout " << layout);
      Int4Call call(layout);
      if (!function.launches) std::memset(call.g_idx.data(), 0, call.g_idx.size());
      const nf4_status status = function.call(call);
      CHECK((status == NF4_STATUS_OK) == !function.launches);
      if (function.launches) {
        CHECK(nf4_last_error() != std::string());
        CHECK(call.untouched());
      }
    }
}

TEST_CASE("a column out of range is named on the CPU, and nothing is written", "[api]") {
  struct Index {
    const char *name;
    int32_t value, end;
  };
  for (const Index &index : {Index{"g_idx", kInt4Groups, kInt4Groups},
                             {"g_idx", -1, kInt4Groups},
                             {"g_idx", INT_MAX, kInt4Groups},
                             {"g_idx", INT_MIN, kInt4Groups},
                             {"permutation", kInt4K, kInt4K},
                             {"permutation", -1, kInt4K}})
    for (const Int4Function &function : int4_functions()) {
      const bool of_groups = index.name == std::string("g_idx");
      const int takes_it = kDequantize | kMultiply | (of_groups ? kReorder : 0);
      if (function.launches || (function.work & takes_it) == 0) continue;
      INFO(function.name << ", " << index.name << " " << index.value);
      for (const int64_t at : {int64_t{0}, kInt4K - 1}) {
        Int4Call call(kGptq);
        const GuardedBuffer &buffer = of_groups ? call.g_idx : call.permutation;
        int32_t *const values = Int4Call::integers(buffer);
        std::memset(values, 0, buffer.size());
        values[at] = index.value;
        (of_groups ? call.tensor.g_idx : call.tensor.permutation) = values;
        CHECK(function.call(call) == NF4_STATUS_INVALID_ARGUMENT);
        const std::string found = "[" + std::to_string(at) + "] is " + std::to_string(index.value);
        const std::string expected = index.name + found + "; expected 0 to ";
        const std::string error = nf4_last_error();  // a batch counts its products before it
        CHECK(error.find(expected + std::to_string(index.end - 1)) != error.npos);
        std::memset(values, 0xa5, buffer.size());
        CHECK(call.y.untouched());
        CHECK(call.dense.untouched());
        CHECK(call.reordered.untouched());
      }
    }
}
