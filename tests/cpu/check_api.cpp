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

const std::vector<BadArgument> kBadArguments = {
    {"no tensor", Who::kAll, false, [](Call &c) { c.weight = nullptr; }, {"nf4_tensor", "NULL"}},
    {"no packed", Who::kAll, false, [](Call &c) { c.tensor.packed = nullptr; }, {"packed", "NULL"}},
    {"no absmax", Who::kAll, false, [](Call &c) { c.tensor.absmax = nullptr; }, {"absmax", "NULL"}},
    {"no absmax, nested",
     Who::kAll,
     true,
     [](Call &c) { c.tensor.absmax = nullptr; },
     {"absmax", "NULL"}},
    {"no out", Who::kDequant, false, [](Call &c) { c.dense = nullptr; }, {"out", "NULL"}},
    {"no in", Who::kQuantize, false, [](Call &c) { c.dense = nullptr; }, {"in", "NULL"}},
    {"no workspace",
     Who::kQuantize,
     true,
     [](Call &c) { c.workspace = nullptr; },
     {"workspace", "NULL"}},
    {"no nested_absmax",
     Who::kAll,
     true,
     [](Call &c) { c.tensor.nested_absmax = nullptr; },
     {"nested_absmax", "NULL"}},
    {"no nested_code",
     Who::kAll,
     true,
     [](Call &c) { c.tensor.nested_code = nullptr; },
     {"nested_code", "NULL"}},
    {"no nested_offset",
     Who::kAll,
     true,
     [](Call &c) { c.tensor.nested_offset = nullptr; },
     {"nested_offset", "NULL"}},
    {"flat with nested_absmax",
     Who::kAll,
     false,
     [](Call &c) { c.tensor.nested_absmax = Call::floats(c.nested_absmax); },
     {"nested_absmax", "flat"}},
    {"flat with nested_code",
     Who::kAll,
     false,
     [](Call &c) { c.tensor.nested_code = Call::floats(c.nested_code); },
     {"nested_code", "flat"}},
    {"flat with nested_offset",
     Who::kAll,
     false,
     [](Call &c) { c.tensor.nested_offset = Call::floats(c.nested_offset); },
     {"nested_offset", "flat"}},
    {"struct_size 0",
     Who::kAll,
     false,
     [](Call &c) { c.tensor.struct_size = 0; },
     {"struct_size", "0"}},
    {"struct_size of a later version",
     Who::kAll,
     false,
     [](Call &c) { c.tensor.struct_size = sizeof(nf4_tensor) + 8; },
     {"struct_size", std::to_string(sizeof(nf4_tensor) + 8)}},
    {"format 0", Who::kAll, false, [](Call &c) { c.tensor.format = 0; }, {"format", "0"}},
    {"format 3", Who::kAll, false, [](Call &c) { c.tensor.format = 3; }, {"format", "3"}},
    {"blocksize 0", Who::kAll, false, [](Call &c) { c.tensor.blocksize = 0; }, {"blocksize", "0"}},
    {"blocksize -64",
     Who::kAll,
     false,
     [](Call &c) { c.tensor.blocksize = -64; },
     {"blocksize", "-64"}},
    {"blocksize -2^31",
     Who::kAll,
     false,
     [](Call &c) { c.tensor.blocksize = INT_MIN; },
     {"blocksize", "-2147483648"}},
    {"blocksize 96",
     Who::kAll,
     false,
     [](Call &c) { c.tensor.blocksize = 96; },
     {"blocksize", "96"}},
    {"blocksize 16",
     Who::kAll,
     false,
     [](Call &c) { c.tensor.blocksize = 16; },
     {"blocksize", "16"}},
    {"blocksize 8192",
     Who::kAll,
     false,
     [](Call &c) { c.tensor.blocksize = 8192; },
     {"blocksize", "8192"}},
    {"nested_blocksize -1",
     Who::kAll,
     true,
     [](Call &c) { c.tensor.nested_blocksize = -1; },
     {"nested_blocksize", "-1"}},
    {"nested_blocksize 3",
     Who::kAll,
     true,
     [](Call &c) { c.tensor.nested_blocksize = 3; },
     {"nested_blocksize", "3"}},
    {"nested_blocksize -2^31",
     Who::kAll,
     true,
     [](Call &c) { c.tensor.nested_blocksize = INT_MIN; },
     {"nested_blocksize", "-2147483648"}},
    {"reserved 1", Who::kAll, false, [](Call &c) { c.tensor.reserved = 1; }, {"reserved", "1"}},
    {"rows -1", Who::kAll, false, [](Call &c) { c.tensor.rows = -1; }, {"rows", "-1"}},
    {"cols -1", Who::kAll, false, [](Call &c) { c.tensor.cols = -1; }, {"cols", "-1"}},
    {"rows and cols both negative",
     Who::kAll,
     false,
     [](Call &c) { c.tensor.rows = c.tensor.cols = -5; },
     {"rows", "-5"}},
    {"rows * cols beyond int64",
     Who::kAll,
     false,
     [](Call &c) { c.tensor.rows = c.tensor.cols = int64_t{1} << 32; },
     {"rows * cols", "4294967296"}},
    {"rows * cols beyond 2^60",
     Who::kAll,
     false,
     [](Call &c) {
       c.tensor.rows = (int64_t{1} << 60) + 1;
       c.tensor.cols = 1;
     },
     {"rows * cols", "1152921504606846977"}},
    {"no such out_dtype", Who::kDequant, false, [](Call &c) { c.dtype = 0; }, {"out_dtype", "0"}},
    {"no such in_dtype", Who::kQuantize, false, [](Call &c) { c.dtype = 4; }, {"in_dtype", "4"}},
    {"negative threads", Who::kCpu, false, [](Call &c) { c.threads = -1; }, {"threads", "-1"}},
    {"misaligned fp32 out",
     Who::kDequant,
     false,
     [](Call &c) { c.dense = moved(c.dense, 2); },
     {"out", "multiple of 4"}},
    {"misaligned fp32 in",
     Who::kQuantize,
     false,
     [](Call &c) { c.dense = moved(c.dense, 2); },
     {"in", "multiple of 4"}},
    {"misaligned 16-bit out",
     Who::kDequant,
     false,
     [](Call &c) {
       c.dtype = NF4_DTYPE_BF16;
       c.dense = moved(c.dense, 1);
     },
     {"out", "multiple of 2"}},
    {"misaligned absmax",
     Who::kAll,
     false,
     [](Call &c) { c.tensor.absmax = moved(c.tensor.absmax, 1); },
     {"absmax", "multiple of 4"}},
    {"misaligned nested_absmax",
     Who::kAll,
     true,
     [](Call &c) { c.tensor.nested_absmax = moved(c.tensor.nested_absmax, 2); },
     {"nested_absmax", "multiple of 4"}},
    {"misaligned nested_code",
     Who::kAll,
     true,
     [](Call &c) { c.tensor.nested_code = moved(c.tensor.nested_code, 2); },
     {"nested_code", "multiple of 4"}},
    {"misaligned nested_offset",
     Who::kAll,
     true,
     [](Call &c) { c.tensor.nested_offset = moved(c.tensor.nested_offset, 1); },
     {"nested_offset", "multiple of 4"}},
    {"misaligned codebook",
     Who::kAll,
     false,
     [](Call &c) { c.tensor.codebook = moved(Call::floats(c.codebook), 1); },
     {"codebook", "multiple of 4"}},
    {"misaligned workspace",
     Who::kQuantize,
     true,
     [](Call &c) { c.workspace = moved(c.workspace, 8); },
     {"workspace", "multiple of 16"}},
    {"workspace too small",
     Who::kQuantize,
     true,
     [](Call &c) { c.workspace_bytes = 39; },
     {"workspace_bytes", "39", "40"}},
    {"out overlaps packed",
     Who::kDequant,
     false,
     [](Call &c) { c.tensor.packed = moved(c.dense, kDenseBytes - 1); },
     {"overlaps", "packed", "out"}},
    {"out overlaps absmax",
     Who::kDequant,
     false,
     [](Call &c) { c.tensor.absmax = moved(c.dense, 4); },
     {"overlaps", "absmax", "out"}},
    {"out overlaps nested_code",
     Who::kDequant,
     true,
     [](Call &c) { c.tensor.nested_code = static_cast<float *>(c.dense); },
     {"overlaps", "nested_code", "out"}},
    {"out overlaps codebook",
     Who::kDequant,
     false,
     [](Call &c) { c.tensor.codebook = static_cast<float *>(c.dense); },
     {"overlaps", "codebook", "out"}},
    {"packed overlaps in",
     Who::kQuantize,
     false,
     [](Call &c) { c.tensor.packed = c.dense; },
     {"overlaps", "packed", "in"}},
    {"absmax overlaps packed",
     Who::kQuantize,
     true,
     [](Call &c) { c.tensor.absmax = moved(c.tensor.packed, kPackedBytes - 1); },
     {"overlaps", "packed", "absmax"}},
    {"workspace overlaps in",
     Who::kQuantize,
     true,
     [](Call &c) { c.workspace = c.dense; },
     {"overlaps", "workspace", "in"}},
    {"nested_offset overlaps nested_absmax",
     Who::kQuantize,
     true,
     [](Call &c) { c.tensor.nested_offset = c.tensor.nested_absmax + 2; },
     {"overlaps", "nested_offset", "nested_absmax"}},
    {"nested_code overlaps packed",
     Who::kQuantize,
     true,
     [](Call &c) { c.tensor.packed = c.nested_code.data() + 1000; },
     {"overlaps", "nested_code", "packed"}},
};

}  // namespace

TEST_CASE("a bad argument is named, and nothing is written", "[api]") {
  check_bad_arguments(kBadArguments);
}

TEST_CASE("the call that the table breaks is right", "[api]") {
  for (const bool nested : {false, true}) {
    for (const Function &function : functions()) {
      INFO(function.name);
      Call call(nested);
      // Poison, to which the tiny products of poison would add nothing.
      call.args.bias = nullptr;
      const nf4_status status = function.call(call);
      if (!function.launches) {
        CHECK(status == NF4_STATUS_OK);
        CHECK(!call.untouched());
      } else {
        // Host pointers: no CUDA or no GPU is to blame, or the pointers themselves.
        CHECK(status != NF4_STATUS_OK);
        CHECK(nf4_last_error() != std::string());
        CHECK(call.untouched());
      }
    }
  }
}

TEST_CASE("packed and nested absmax may lie at any byte", "[api]") {
  for (int shift = 0; shift < 16; ++shift) {
    Call call(true);
    const GuardedBuffer packed(kPackedBytes, Edge::kStart, shift);
    const GuardedBuffer absmax(5, Edge::kStart, shift);
    call.tensor.packed = packed.data();
    call.tensor.absmax = absmax.data();
    CHECK(nf4_quantize_cpu(call.dense, call.dtype, call.weight, call.workspace,
                           call.workspace_bytes, 1) == NF4_STATUS_OK);
    CHECK(nf4_dequant_cpu(call.weight, call.dense, call.dtype, 1) == NF4_STATUS_OK);
  }
}

TEST_CASE("inputs may share memory", "[api]") {
  Call call(false);
  std::memset(call.absmax.data(), 0, call.absmax.size());
  call.tensor.packed = call.absmax.data();
  call.tensor.cols = 1;
  CHECK(nf4_dequant_cpu(call.weight, call.dense, call.dtype, 1) == NF4_STATUS_OK);
}

TEST_CASE("what would go beyond the last address overlaps what is before it", "[api]") {
  Call call(false);
  call.tensor.rows = 1 << 20;
  call.dense = reinterpret_cast<void *>(UINTPTR_MAX - 4095);  // 4 KiB of more than 400 MB
  for (const uintptr_t last : {64, 4, 1}) {
    call.tensor.packed = reinterpret_cast<void *>(UINTPTR_MAX - last);
    CHECK(nf4_dequant_cpu(call.weight, call.dense, call.dtype, 1) == NF4_STATUS_INVALID_ARGUMENT);
    CHECK(nf4_last_error() == std::string("packed overlaps out"));
  }
}
