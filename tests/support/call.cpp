#include "support/call.hpp"

#include "support/catch.hpp"

namespace nf4::test {
namespace {

bool concerns(Who who, const Function &function) {
  switch (who) {
    case Who::kAll:
      return true;
    case Who::kCpu:
      return !function.launches;
    case Who::kDequant:
      return function.work == Work::kDequant;
    case Who::kQuantize:
      return function.work == Work::kQuantize;
    case Who::kMatmul:
      return function.work == Work::kMatmul;
    case Who::kMatmulLaunch:
      return function.work == Work::kMatmul && function.launches;
  }
  return false;
}

// Two products, as the functions of a batch take them.
struct Products {
  const nf4_tensor *const *weights;
  const nf4_matmul_args *args;
};

// The product of a call as the second of two, of which the first is right and is not done either
// where the second is not.
template <class Multiply>
nf4_status after_another(const Call &call, const Multiply &multiply) {
  const Call right(false);
  const nf4_tensor *const weights[] = {right.weight, call.weight};
  const nf4_matmul_args args[] = {right.args, call.matmul ? *call.matmul : nf4_matmul_args{}};
  const nf4_status status = multiply({weights, call.matmul ? args : nullptr});
  if (status != NF4_STATUS_OK) CHECK(right.untouched());
  return status;
}

void check(const BadArgument &bad, const Function &function) {
  INFO(function.name << ": " << bad.what);
  Call call(bad.nested);
  if (bad.nested) std::memset(call.nested_code.data(), 0xa5, 256 * 4);
  bad.change(call);
  CHECK(function.call(call) == NF4_STATUS_INVALID_ARGUMENT);
  const std::string error = nf4_last_error();
  for (const std::string &word : bad.named) {
    INFO("nf4_last_error(): " << error);
    CHECK(error.find(word) != std::string::npos);
  }
  CHECK(call.untouched());
  CHECK(call.nested_code.untouched());
}

}  // namespace

const std::vector<Function> &functions() {
  static const std::vector<Function> list = {
      {"nf4_dequant_cpu", Work::kDequant, false,
       [](const Call &c) { return nf4_dequant_cpu(c.weight, c.dense, c.dtype, c.threads); }},
      {"nf4_dequant_launch", Work::kDequant, true,
       [](const Call &c) { return nf4_dequant_launch(c.weight, c.dense, c.dtype, nullptr); }},
      {"nf4_quantize_cpu", Work::kQuantize, false,
       [](const Call &c) {
         return nf4_quantize_cpu(c.dense, c.dtype, c.weight, c.workspace, c.workspace_bytes,
                                 c.threads);
       }},
      {"nf4_quantize_launch", Work::kQuantize, true,
       [](const Call &c) {
         return nf4_quantize_launch(c.dense, c.dtype, c.weight, c.workspace, c.workspace_bytes,
                                    nullptr);
       }},
      {"nf4_matmul_cpu", Work::kMatmul, false,
       [](const Call &c) { return nf4_matmul_cpu(c.weight, c.matmul, c.threads); }},
      {"nf4_matmul_launch", Work::kMatmul, true,
       [](const Call &c) {
         return nf4_matmul_launch(c.weight, c.matmul, c.workspace, c.workspace_bytes, nullptr);
       }},
      {"nf4_matmul_batch_cpu", Work::kMatmul, false,
       [](const Call &c) {
         return after_another(c, [&](const Products &products) {
           return nf4_matmul_batch_cpu(products.weights, products.args, 2, c.threads);
         });
       }},
      {"nf4_matmul_batch_launch", Work::kMatmul, true,
       [](const Call &c) {
         return after_another(c, [&](const Products &products) {
           return nf4_matmul_batch_launch(products.weights, products.args, 2, c.workspace,
                                          c.workspace_bytes, nullptr);
         });
       }},
  };
  return list;
}

void check_bad_arguments(const std::vector<BadArgument> &table) {
  for (const BadArgument &bad : table)
    for (const Function &function : functions())
      if (concerns(bad.who, function)) check(bad, function);
}

}  // namespace nf4::test
