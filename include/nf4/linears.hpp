// Loads the linear layers of a checkpoint into the memory of an engine, whatever their weights are:
// NF4, FP4, integers or dense. Header-only, C++17. ERRORS are as in checkpoint.hpp.
//
// LIFETIMES  A Loader needs its Checkpoint, and so does everything that it loads in place. Linears
//            keep the pointers that they are given.
// THREADS    A Loader is for one thread at a time.
#ifndef NF4_LINEARS_HPP
#define NF4_LINEARS_HPP

#include <cstring>
#include <functional>
#include <map>
#include <nf4/checkpoint.hpp>
#include <nf4/products.hpp>
#include <string>
#include <utility>
#include <vector>

namespace nf4 {
inline namespace NF4_INLINE_NAMESPACE {

// Layers that share one x, such as q, k and v. Their outputs lie side by side in a row of y.
template <class T>
struct Linears {
  // y = x W^T + bias for a dense weight [rows, cols], row-major. cols is args.x_stride.
  struct Dense {
    const T *weight;
    int64_t rows;
    nf4_matmul_args args;
  };
  Products products;         // with 4-bit weights
  std::vector<Dense> dense;  // the engine computes these

  // Sets the number of rows of x and y.
  void set_rows(int64_t m) {
    products.set_rows(m);
    for (Dense &each : dense) each.args.m = m;
  }
};

// The dtype of T, which is float or an engine's 2-byte class to which a float converts; the bits of
// T(1) tell which. Throws if T is neither fp32, fp16 nor bf16.
template <class T>
nf4_dtype dtype_of() {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "fp32, fp16 and bf16 have 4 or 2 bytes");
  const T one = T(1.0f);
  uint32_t bits = 0;
  std::memcpy(&bits, static_cast<const void *>(&one), sizeof one);
  const uint32_t fp32 = 0x3f800000, fp16 = 0x3c00, bf16 = 0x3f80;
  require(bits == (sizeof(T) == 4 ? fp32
                   : bits == fp16 ? fp16
                                  : bf16),
          "numbers of an engine are none of fp32, fp16 and bf16");
  return bits == fp32 ? NF4_DTYPE_FP32 : bits == fp16 ? NF4_DTYPE_FP16 : NF4_DTYPE_BF16;
}

// Loads the layers that an engine needs. T, a type that dtype_of accepts, is the type of x, y,
// biases and dense weights.
template <class T>
class Loader {
 public:
  // Copies bytes and returns the address of the copy, which must stay valid; `name` is for errors.
  using Copy = std::function<void *(const void *data, size_t bytes, const std::string &name)>;

  // in_place: 4-bit weights stay where the Checkpoint has them, mostly in the mapped files, as on a
  // CPU; otherwise `copy` moves their parts.
  Loader(const Checkpoint &checkpoint, bool in_place, Copy copy)
      : checkpoint_(checkpoint), in_place_(in_place), copy_(std::move(copy)) {}
  Loader(const Checkpoint &&, bool, Copy) = delete;  // a temporary Checkpoint would be gone

  // Copies numbers; `name` is for errors.
  template <class U>
  U *copy(const std::vector<U> &numbers, const std::string &name) const {
    return static_cast<U *>(copy_(numbers.data(), numbers.size() * sizeof(U), name));
  }
  // Returns a dense tensor as T, in the same memory for the same name. Throws if its shape differs.
  const T *dense(const std::string &name, const Shape &shape) {
    checkpoint_.tensor(name, shape);
    const T *&memory = dense_[name];
    return memory ? memory : memory = copy(checkpoint_.dense<T>(name, shape), name);
  }
  // Loads layers. Each is given by the part of its name between `prefix` and ".weight", and by its
  // number of rows; x has `cols` columns. Integers with act order are sorted. Throws what
  // Checkpoint throws.
  Linears<T> linears(const std::string &prefix,
                     const std::vector<std::pair<const char *, int64_t>> &layers, bool has_bias,
                     const T *x, int64_t cols, T *y) {
    Linears<T> linears;
    nf4_matmul_args args{sizeof args, dtype_of<T>(), 0, 0, x, cols, nullptr, y, 0, nullptr};
    for (const auto &layer : layers) args.y_stride += layer.second;
    for (const auto &[layer, rows] : layers) {
      const std::string name = prefix + layer + ".weight";
      if (has_bias) args.bias = dense(prefix + layer + ".bias", {rows});
      args.y = y;
      if (checkpoint_.is_nf4(name))
        linears.products.add(moved(checkpoint_.nf4_weight(name, {rows, cols}), name), args);
      else if (checkpoint_.is_int4(name))
        linears.products.add(
            moved(checkpoint_.sorted(checkpoint_.int4_weight(name, {rows, cols})), name), args);
      else
        linears.dense.push_back({dense(name, {rows, cols}), rows, args});
      if (y) y += rows;
    }
    return linears;
  }

 private:
  template <class Weight>
  Weight moved(const Weight &weight, const std::string &name) const {
    if (in_place_) return weight;
    return copy_parts(weight, [&](const void *part, int64_t bytes) {
      return copy_(part, static_cast<size_t>(bytes), name);
    });
  }

  const Checkpoint &checkpoint_;
  bool in_place_;
  Copy copy_;
  std::map<std::string, const T *> dense_;
};

}  // namespace NF4_INLINE_NAMESPACE
}  // namespace nf4

#endif
