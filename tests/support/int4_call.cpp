#include "support/int4_call.hpp"

#include "support/catch.hpp"

namespace nf4::test {
namespace {

template <class Reorder>
nf4_status reorder(const Int4Call &c, const Reorder &call) {
  const nf4_int4_tensor from = c.from();
  return call(c.weight == nullptr ? nullptr : &from, c.target);
}

}  // namespace

const std::vector<Int4Function> &int4_functions() {
  static const std::vector<Int4Function> list = {
      {"nf4_int4_dequant_cpu", kDequantize, false,
       [](const Int4Call &c) { return nf4_int4_dequant_cpu(c.weight, c.out, c.dtype, c.threads); }},
      {"nf4_int4_dequant_launch", kDequantize, true,
       [](const Int4Call &c) {
         return nf4_int4_dequant_launch(c.weight, c.out, c.dtype, nullptr);
       }},
      {"nf4_int4_quantize_cpu", kQuantizing, false,
       [](const Int4Call &c) {
         return nf4_int4_quantize_cpu(c.out, c.dtype, c.weight, c.symmetric, c.threads);
       }},
      {"nf4_int4_quantize_launch", kQuantizing, true,
       [](const Int4Call &c) {
         return nf4_int4_quantize_launch(c.out, c.dtype, c.weight, c.symmetric, nullptr);
       }},
      {"nf4_int4_reorder_cpu", kReorder, false,
       [](const Int4Call &c) {
         return reorder(
             c, [&](auto from, auto to) { return nf4_int4_reorder_cpu(from, to, c.threads); });
       }},
      {"nf4_int4_reorder_launch", kReorder, true,
       [](const Int4Call &c) {
         return reorder(
             c, [](auto from, auto to) { return nf4_int4_reorder_launch(from, to, nullptr); });
       }},
      {"nf4_int4_matmul_cpu", kMultiply, false,
       [](const Int4Call &c) { return nf4_int4_matmul_cpu(c.weight, c.matmul, c.threads); }},
      {"nf4_int4_matmul_launch", kMultiply, true,
       [](const Int4Call &c) {
         return nf4_int4_matmul_launch(c.weight, c.matmul, c.workspace.data(), c.workspace.size(),
                                       nullptr);
       }},
      {"nf4_int4_matmul_batch_cpu", kMultiply, false,
       [](const Int4Call &c) {
         return nf4_int4_matmul_batch_cpu(&c.weight, c.matmul, 1, c.threads);
       }},
      {"nf4_int4_matmul_batch_launch", kMultiply, true,
       [](const Int4Call &c) {
         return nf4_int4_matmul_batch_launch(&c.weight, c.matmul, 1, c.workspace.data(),
                                             c.workspace.size(), nullptr);
       }},
  };
  return list;
}

void check_faults(const std::vector<Int4Fault> &faults) {
  for (const Int4Fault &fault : faults)
    for (const Int4Function &function : int4_functions()) {
      if ((fault.who & function.work) == 0) continue;
      if ((fault.who & kLaunch) != 0 && !function.launches) continue;
      INFO(function.name << ": " << fault.what);
      Int4Call call(fault.layout);
      fault.change(call);
      CHECK(function.call(call) == NF4_STATUS_INVALID_ARGUMENT);
      const std::string error = nf4_last_error();
      INFO("nf4_last_error(): " << error);
      for (const std::string &word : fault.named) CHECK(error.find(word) != std::string::npos);
      CHECK(call.untouched());
    }
}

}  // namespace nf4::test
