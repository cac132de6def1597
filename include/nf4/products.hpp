// Weights of nf4.h of either kind, nf4_tensor or nf4_int4_tensor: lists their parts, and multiplies
// one x with several weights, such as q, k and v, in one call per kind. Header-only, C++17.
#ifndef NF4_PRODUCTS_HPP
#define NF4_PRODUCTS_HPP

#include <nf4/nf4.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <list>
#include <nf4/json.hpp>
#include <string>
#include <type_traits>
#include <vector>

namespace nf4 {
inline namespace NF4_INLINE_NAMESPACE {

// Throws the text of nf4_last_error() with `name`, if a call failed.
inline void check(nf4_status status, const std::string &name = "") {
  require(status == NF4_STATUS_OK, name, name.empty() ? "" : ": ", nf4_status_string(status), ": ",
          nf4_last_error());
}

inline nf4_sizes sizes_of(const nf4_tensor &weight, const std::string &name = "") {
  nf4_sizes sizes{sizeof sizes, 0, 0, 0, 0, 0};
  check(nf4_tensor_sizes(&weight, &sizes), name);
  return sizes;
}
inline nf4_int4_sizes sizes_of(const nf4_int4_tensor &weight, const std::string &name = "") {
  nf4_int4_sizes sizes{sizeof sizes, 0, 0, 0, 0};
  check(nf4_int4_tensor_sizes(&weight, &sizes), name);
  return sizes;
}

// Enqueues a kernel that writes a dense weight [rows, cols], row-major, to `out`.
inline void dequant_launch(const nf4_tensor &weight, void *out, nf4_dtype dtype,
                           nf4_stream stream) {
  check(nf4_dequant_launch(&weight, out, dtype, stream));
}
inline void dequant_launch(const nf4_int4_tensor &weight, void *out, nf4_dtype dtype,
                           nf4_stream stream) {
  check(nf4_int4_dequant_launch(&weight, out, dtype, stream));
}

// Calls visit(part, bytes) for the parts of a weight; some may be NULL.
template <class Visit>
void visit_parts(nf4_tensor &weight, Visit visit) {
  const nf4_sizes sizes = sizes_of(weight);
  visit(weight.packed, sizes.packed_bytes);
  visit(weight.absmax, sizes.absmax_bytes);
  visit(weight.nested_absmax, sizes.nested_blocks * 4);
  visit(weight.nested_code, 256 * 4);
  visit(weight.nested_offset, 4);
  visit(weight.codebook, 16 * 4);
}
template <class Visit>
void visit_parts(nf4_int4_tensor &weight, Visit visit) {
  const nf4_int4_sizes sizes = sizes_of(weight);
  visit(weight.packed, sizes.packed_bytes);
  visit(weight.scales, sizes.scales_bytes);
  visit(weight.zeros, sizes.zeros_bytes);
  visit(weight.g_idx, weight.cols * 4);
  visit(weight.permutation, weight.cols * 4);
}
// Returns a weight whose parts are elsewhere, such as in the memory of a GPU: copy(part, bytes)
// returns the address of the copy of a part.
template <class Weight, class Copy>
Weight copy_parts(Weight weight, Copy copy) {
  visit_parts(weight, [&copy](auto *&part, int64_t bytes) {
    if (part) part = static_cast<std::remove_reference_t<decltype(part)>>(copy(part, bytes));
  });
  return weight;
}

// Sets the costs in a file that `nf4 tune` wrote, before the first product (nf4_set_costs).
// Throws if it cannot be read, or is of another version of the library.
inline void set_costs_of(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  require(file.good(), path, ": cannot be read");
  check(nf4_set_costs(text.data(), text.size()), path);
}

// Several products of one x. Its functions throw if nf4_matmul_batch_* or nf4_int4_matmul_batch_*
// refuse the arguments. It copies descriptors and args, and keeps the pointers in them.
class Products {
 public:
  void add(const nf4_tensor &weight, const nf4_matmul_args &args) { nf4_.add(weight, args); }
  void add(const nf4_int4_tensor &weight, const nf4_matmul_args &args) { int4_.add(weight, args); }
  // Sets the number of rows of x and y in all args.
  void set_rows(int64_t m) {
    for (auto *all : {&nf4_.args, &int4_.args})
      for (nf4_matmul_args &args : *all) args.m = m;
  }

  // Computes the products on host memory; threads as in nf4_dequant_cpu.
  void cpu(int32_t threads = 0) const {
    check(nf4_matmul_batch_cpu(nf4_.data(), nf4_.args.data(), nf4_.size(), threads));
    check(nf4_int4_matmul_batch_cpu(int4_.data(), int4_.args.data(), int4_.size(), threads));
  }
  // The bytes of workspace that `launch` needs; fewer rows never need more.
  size_t workspace_size() const {
    size_t nf4 = 0, int4 = 0;
    check(nf4_matmul_batch_workspace_size(nf4_.data(), nf4_.args.data(), nf4_.size(), &nf4));
    check(
        nf4_int4_matmul_batch_workspace_size(int4_.data(), int4_.args.data(), int4_.size(), &int4));
    return std::max(nf4, int4);
  }
  // Tells whether a dense weight for each product is expected to take less time than `launch` or,
  // for NF4_DEVICE_CPU, than `cpu`: nf4_matmul_path and nf4_int4_matmul_path answer NF4_PATH_DENSE
  // for all. Without a product it is false. The answer for a number of rows stays the same until
  // nf4_set_costs is called, so engines may keep it.
  bool prefer_dense(int32_t device) const {
    return nf4_.size() + int4_.size() > 0 && nf4_.all_dense(nf4_matmul_path, device) &&
           int4_.all_dense(nf4_int4_matmul_path, device);
  }
  // Calls visit(weight, args) for each product, NF4 and FP4 first, for an engine that computes them
  // itself.
  template <class Visit>
  void visit(Visit visit) const {
    nf4_.visit(visit);
    int4_.visit(visit);
  }
  // Enqueues the products on a stream.
  void launch(void *workspace, size_t bytes, nf4_stream stream) const {
    check(nf4_matmul_batch_launch(nf4_.data(), nf4_.args.data(), nf4_.size(), workspace, bytes,
                                  stream));
    check(nf4_int4_matmul_batch_launch(int4_.data(), int4_.args.data(), int4_.size(), workspace,
                                       bytes, stream));
  }

 private:
  template <class Weight>
  struct Batch {
    std::list<Weight> weights;  // a list, since nf4.h takes the weights by their addresses
    std::vector<const Weight *> pointers;
    std::vector<nf4_matmul_args> args;

    Batch() = default;
    Batch(Batch &&) = default;  // a list's elements stay where they are
    Batch &operator=(Batch &&) = default;
    void add(const Weight &weight, const nf4_matmul_args &its) {
      pointers.push_back(&weights.emplace_back(weight));
      args.push_back(its);
    }
    template <class Path>
    bool all_dense(Path path, int32_t device) const {
      bool dense = true;
      visit([&](const Weight &weight, const nf4_matmul_args &its) {
        nf4_path found = NF4_PATH_FUSED;
        check(path(&weight, &its, device, &found));
        dense = dense && found == NF4_PATH_DENSE;
      });
      return dense;
    }
    template <class Visit>
    void visit(Visit &&visit) const {
      for (size_t i = 0; i < size(); ++i) visit(*pointers[i], args[i]);
    }
    const Weight *const *data() const { return pointers.data(); }
    size_t size() const { return args.size(); }
  };

  Batch<nf4_tensor> nf4_;
  Batch<nf4_int4_tensor> int4_;
};

}  // namespace NF4_INLINE_NAMESPACE
}  // namespace nf4

#endif
