// Products of experts, and their gradient. The rows of one expert are a product with rows of the
// stacked weight.
#include "core/formats.hpp"
#include "core/int4.hpp"
#include "cpu/backend.hpp"
#include "cpu/call_environment.hpp"
#include "cpu/matmul/grouped_partition.hpp"
#include "cpu/parallel.hpp"

namespace nf4::cpu {
namespace {

// Advances an address by a number of bytes; NULL stays NULL.
template <class T>
T *offset_by(T *address, int64_t bytes) {
  if (address == nullptr) return nullptr;
  return reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(address) + bytes);
}

template <class W>
Group group_of(const GroupedProblemOf<W> &problem, int32_t expert, RowRange m) {
  Group group;
  group.first_row = expert * problem.expert_rows();
  group.row_scale = offset_by(problem.row_scale, m.begin * 4);
  group.x_index = offset_by(problem.x_index, m.begin * 4);
  group.x_rows = problem.x_rows;
  return group;
}

// Sets the fields that the products of all kinds of weights share. `first` is the first row of the
// product's weight, at which its bias and its y begin.
template <class W>
MatmulProblemOf<W> common_product(const GroupedProblemOf<W> &problem, int32_t expert, RowRange m,
                                  int64_t first) {
  const int64_t item = element_bytes(problem.dtype);
  MatmulProblemOf<W> product{};
  product.gradient = problem.gradient;
  product.weight = problem.weight;
  product.dtype = problem.dtype;
  product.m = m.end - m.begin;
  product.x = problem.x;
  product.x_stride = problem.x_stride;
  product.bias = offset_by(problem.bias, (expert * problem.bias_stride - first) * item);
  product.y = offset_by(problem.y, (m.begin * problem.y_stride - first) * item);
  product.y_stride = problem.y_stride;
  if (problem.x_index == nullptr)
    product.x = offset_by(problem.x, m.begin * problem.x_stride * item);
  return product;
}

// If there is no row of x, there is nothing to multiply.
template <class W>
bool lacks_x(const GroupedProblemOf<W> &problem) {
  return problem.x_index != nullptr && problem.x_rows == 0;
}

// The product has the whole stacked weight and uses its own rows of it.
MatmulProblem product_of_expert(const GroupedProblem &problem, int32_t expert, RowRange m) {
  MatmulProblem product =
      common_product(problem, expert, m, problem.gradient ? 0 : expert * problem.expert_rows());
  if (problem.gradient)
    product.weight.rows = lacks_x(problem) ? 0 : problem.expert_rows();
  else if (lacks_x(problem))
    product.weight.cols = 0;
  return product;
}

Int4MatmulProblem product_of_expert(const Int4GroupedProblem &problem, int32_t expert, RowRange m) {
  Int4MatmulProblem product = common_product(problem, expert, m, 0);
  Int4Weight &weight = product.weight;
  const int64_t words = int4_packed_words(weight.layout, weight.rows, weight.cols);
  weight.packed = offset_by(weight.packed, expert * words * 4);
  weight.scales = offset_by(weight.scales, expert * weight.rows * weight.groups * 2);
  weight.zeros = offset_by(weight.zeros, expert * int4_zero_words(weight.rows, weight.groups) * 4);
  weight.g_idx = offset_by(weight.g_idx, expert * weight.cols * 4);
  weight.permutation = offset_by(weight.permutation, expert * weight.cols * 4);
  if (lacks_x(problem)) weight.cols = 0;
  return product;
}

// Calls run(expert, its product, columns of y), once for each part of y.
template <class W, class Run>
void for_experts(const GroupedProblemOf<W> &problem, int threads, const Run &run) {
  const GroupedPartition<W> partition(problem, threads_of(threads));
  parallel_for(partition.units(), partition.units_per_thread(), threads,
               [&](int64_t begin, int64_t end) {
                 partition.for_each(begin, end, [&](int32_t expert, RowRange m, RowRange columns) {
                   const Group group = group_of(problem, expert, m);
                   auto product = product_of_expert(problem, expert, m);
                   product.group = &group;
                   run(expert, product, columns);
                 });
               });
}

RoundedCodebook codebook_of(const Variant &variant, const GroupedProblem &problem) {
  if (variant.bf16_codebook == nullptr || problem.gradient) return {};
  MatmulProblem all{};
  all.weight = problem.weight;
  all.dtype = problem.dtype;
  return variant.bf16_codebook(all);
}

}  // namespace

void matmul_grouped(const GroupedProblem &problem, int threads) {
  const CallEnvironment environment;
  const Variant &variant = variant_in_use();
  const RoundedCodebook codebook = codebook_of(variant, problem);
  for_experts(problem, threads,
              [&](int32_t expert, const MatmulProblem &product, RowRange columns) {
                if (problem.gradient) return variant.matmul_grad(product, columns);
                const int64_t first = expert * problem.expert_rows();
                variant.matmul(product, codebook, {first + columns.begin, first + columns.end});
              });
}

void matmul_grouped(const Int4GroupedProblem &problem, int threads) {
  const CallEnvironment environment;
  for_experts(problem, threads, [&](int32_t, const Int4MatmulProblem &product, RowRange n) {
    variant_in_use().int4.matmul(product, n);
  });
}

}  // namespace nf4::cpu
