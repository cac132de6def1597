// The dispatcher's entry of nf4.torch's operators: kernels of torch.ops.nf4._linear,
// ._linear_batch2, ._linear_batch3, ._dense_like and their _int4 variants, and of ._linear_grad,
// ._linear_columns2 and ._linear_columns3.
// Compiled graphs call them. No Python runs. An exception becomes Python's ValueError.
#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "_nf4_body.hpp"

namespace {

using namespace nf4_torch;

void require(const Checked &fault) {
  if (fault) throw std::invalid_argument(fault->text());
}

// The last arguments of an operator: tensors and five numbers. It takes over all tensors before it
// refuses anything.
template <class Kind>
class TakenWeight {
 public:
  static constexpr uint64_t kArguments = Kind::kParts + 5;

  explicit TakenWeight(const Value *stack) {
    for (int i = 0; i < Kind::kParts; ++i)
      parts_[i] = i < Kind::kNeeded ? taken(stack[i]) : taken_if_any(stack[i]);
    std::copy_n(stack + Kind::kParts, spec_.size(), spec_.begin());
  }

  WeightViews<Kind> views() const {
    WeightViews<Kind> made{};
    for (int i = 0; i < Kind::kParts; ++i)
      if (parts_[i]) made.parts[i] = parts_[i].view();
    for (size_t i = 0; i < spec_.size(); ++i) made.spec[i] = static_cast<int64_t>(spec_[i]);
    return made;
  }

 private:
  std::array<Tensor, Kind::kParts> parts_;
  std::array<Value, 5> spec_;
};

// The products of an operator's weights with one x, without their outputs.
template <class Kind, size_t kCount>
class TakenProducts {
 public:
  explicit TakenProducts(const Value *stack) : x(taken(stack[0])), of_x(x.view()) {
    const Value *const first = stack + 1 + kCount;
    weights_.reserve(kCount);
    for (size_t i = 0; i < kCount; ++i) {
      biases_[i] = taken_if_any(stack[1 + i]);
      weights_.emplace_back(first + i * TakenWeight<Kind>::kArguments);
    }
    for (size_t i = 0; i < kCount; ++i) {
      const View bias = biases_[i] ? View(biases_[i].view()) : View();
      require(read_product(of_x, bias, weights_[i].views(), products[i]));
    }
  }

  // An output with this many columns.
  Tensor output(int64_t columns) const {
    std::vector<int64_t> sizes(of_x.shape, of_x.shape + of_x.ndim);
    sizes.back() = columns;
    return Tensor::empty(sizes, x.dtype(), x.device_type(), x.device_index());
  }

  const Tensor x;
  const dl_tensor of_x;
  Product<Kind> products[kCount];

 private:
  Tensor biases_[kCount];
  std::vector<TakenWeight<Kind>> weights_;
};

// _linear(x, bias, WEIGHT) -> y. With several weights: all biases, then all weights -> each y
template <class Kind, size_t kCount>
void linear_operator(Value *stack, uint64_t, uint64_t) {
  TakenProducts<Kind, kCount> given(stack);
  Tensor outputs[kCount];
  for (size_t i = 0; i < kCount; ++i) {
    outputs[i] = given.output(given.products[i].weight.rows);
    given.products[i].args.y = outputs[i].data();
  }
  multiply(given.products, kCount, given.of_x);
  for (size_t i = 0; i < kCount; ++i) stack[i] = outputs[i].release();
}

// _linear_columns2(x, biases, weights) -> each y, side by side in one tensor
template <size_t kCount>
void linear_columns_operator(Value *stack, uint64_t, uint64_t) {
  TakenProducts<Codebook, kCount> given(stack);
  int64_t columns = 0;
  for (const auto &each : given.products) columns += each.weight.rows;
  Tensor y = given.output(columns);
  char *first = static_cast<char *>(y.data());
  for (auto &each : given.products) {
    each.args.y = first;
    each.args.y_stride = columns;
    first += each.weight.rows * (given.of_x.bits / 8);
  }
  multiply(given.products, kCount, given.of_x);
  stack[0] = y.release();
}

// _dense_like(like, WEIGHT) -> the weight in the dtype of `like`
template <class Kind>
void dense_like_operator(Value *stack, uint64_t arguments, uint64_t) {
  const Tensor like = taken(stack[0]);
  const TakenWeight<Kind> taken_weight(stack + arguments - TakenWeight<Kind>::kArguments);
  const dl_tensor of_like = like.view();
  typename Kind::Descriptor weight;
  require(check_first("like", of_like));
  require(read_weight(taken_weight.views(), of_like, weight));
  Tensor dense = Tensor::empty({weight.rows, weight.cols}, like.dtype(), like.device_type(),
                               like.device_index());
  dequantize_to(dense.data(), of_like, weight);
  stack[0] = dense.release();
}

// _linear_grad(grad_y, WEIGHT) -> grad_y W
void linear_grad_operator(Value *stack, uint64_t, uint64_t) {
  const Tensor grad_y = taken(stack[0]);
  const TakenWeight<Codebook> weight(stack + 1);
  const dl_tensor of_y = grad_y.view();
  Product<Codebook> product;
  require(read_gradient(of_y, weight.views(), product));
  std::vector<int64_t> sizes(of_y.shape, of_y.shape + of_y.ndim);
  sizes.back() = product.weight.cols;
  Tensor made = Tensor::empty(sizes, grad_y.dtype(), grad_y.device_type(), grad_y.device_index());
  product.args.y = made.data();
  multiply_gradient(product, of_y);
  stack[0] = made.release();
}

template <class Kind>
bool implement_kind(LibraryHandle library, const std::string &suffix) {
  const std::pair<const char *, Operator> operators[] = {
      {"_linear", linear_operator<Kind, 1>},
      {"_linear_batch2", linear_operator<Kind, 2>},
      {"_linear_batch3", linear_operator<Kind, kMostSiblings>},
      {"_dense_like", dense_like_operator<Kind>}};
  return std::all_of(std::begin(operators), std::end(operators), [&](const auto &each) {
    return torch.implement(library, (each.first + suffix).c_str(), each.second) == 0;
  });
}

}  // namespace

bool nf4_torch::implement(const char *key) {
  LibraryHandle library = nullptr;  // exists as long as the process
  return torch.new_library("nf4", key, "_nf4_dispatcher.cpp", __LINE__, &library) == 0 &&
         implement_kind<Codebook>(library, "") && implement_kind<Int4>(library, "_int4") &&
         torch.implement(library, "_linear_grad", linear_grad_operator) == 0 &&
         torch.implement(library, "_linear_columns2", linear_columns_operator<2>) == 0 &&
         torch.implement(library, "_linear_columns3", linear_columns_operator<kMostSiblings>) == 0;
}
