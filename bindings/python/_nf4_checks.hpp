// What libnf4 gets for the views of a call's tensors, and which argument it does not take.
#ifndef NF4_CHECKS_HPP
#define NF4_CHECKS_HPP

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "_nf4_dlpack.h"
#include "nf4/nf4.h"

namespace nf4_torch {

enum Part { kPacked, kAbsmax, kNestedAbsmax, kNestedCode, kNestedOffset, kCodebook, kParts };
inline constexpr const char *kPartNames[kParts] = {"packed",      "absmax",        "nested_absmax",
                                                   "nested_code", "nested_offset", "codebook"};

using View = std::optional<dl_tensor>;

// A weight as an entry sees it. The numbers are the first of a Spec, in its order.
struct WeightViews {
  std::array<View, kParts> parts;
  std::array<int64_t, 5> spec;
};

// The argument that the body does not take, and what it expects: `count`, if any, and words.
struct Fault {
  const char *argument, *expected;
  int64_t count = -1;

  std::string text() const {
    const std::string number = count < 0 ? "" : std::to_string(count) + " ";
    return std::string(argument) + " is something else; expected " + number + expected;
  }
};
using Checked = std::optional<Fault>;  // of no fault: nothing

// All tensors of a call are where the first is.
inline bool beside(const dl_tensor &view, const dl_tensor &first) {
  return view.device_type == first.device_type && view.device_id == first.device_id;
}

inline Checked check_first(const char *name, const dl_tensor &view) {
  if (view.device_type != DL_CPU && view.device_type != DL_CUDA)
    return Fault{name, "a tensor on the CPU or a CUDA device"};
  if (!has_memory(&view)) return Fault{name, "a tensor that has its memory"};
  if (dtype_of(&view) == 0) return Fault{name, "float32, float16 or bfloat16"};
  return {};
}

inline bool fits(int64_t value, int64_t least) { return value >= least && value <= INT32_MAX; }

inline Checked read_spec(const std::array<int64_t, 5> &spec, nf4_tensor &weight) {
  const auto [rows, cols, format, blocksize, nested_blocksize] = spec;
  if (rows < 0 || cols < 0) return Fault{"shape", "no less than 0"};
  if (rows > 0 && cols > INT64_MAX / rows) return Fault{"shape", "fewer than 2^63 elements"};
  if (!fits(format, 0)) return Fault{"format", "0 to 2^31 - 1"};
  if (!fits(blocksize, 1)) return Fault{"blocksize", "1 to 2^31 - 1"};
  if (!fits(nested_blocksize, 0)) return Fault{"nested_blocksize", "0 to 2^31 - 1"};
  weight = {};
  weight.struct_size = sizeof weight;
  weight.rows = rows;
  weight.cols = cols;
  weight.format = static_cast<nf4_format>(format);
  weight.blocksize = static_cast<int32_t>(blocksize);
  weight.nested_blocksize = static_cast<int32_t>(nested_blocksize);
  return {};
}

// Fills in the descriptor of a weight whose parts are beside `first`.
inline Checked read_weight(const WeightViews &given, const dl_tensor &first, nf4_tensor &weight) {
  if (Checked fault = read_spec(given.spec, weight)) return fault;
  const int64_t elements = weight.rows * weight.cols;
  const int64_t blocks = divide_up(elements, weight.blocksize);
  const bool nested = weight.nested_blocksize != 0;
  const int64_t nested_blocks = nested ? divide_up(blocks, weight.nested_blocksize) : 0;
  const int64_t counts[kParts] = {divide_up(elements, 2), blocks, nested_blocks, 256, 1, 16};
  void *data[kParts] = {};
  for (int i = 0; i < kParts; ++i) {
    const View &view = given.parts[i];
    const bool of_nested = i >= kNestedAbsmax && i <= kNestedOffset;
    if ((of_nested && !nested) || (i == kCodebook && !view)) continue;
    if (!view) return Fault{kPartNames[i], "a tensor, as the weight is nested"};
    const bool bytes = i == kPacked || (i == kAbsmax && nested);
    if (!is_part(&*view, counts[i], bytes) || !has_memory(&*view) || !beside(*view, first))
      return Fault{kPartNames[i], "contiguous elements where the others are", counts[i]};
    data[i] = const_cast<char *>(address_of(&*view));
  }
  weight.packed = static_cast<uint8_t *>(data[kPacked]);
  weight.absmax = data[kAbsmax];
  weight.nested_absmax = static_cast<float *>(data[kNestedAbsmax]);
  weight.nested_code = static_cast<float *>(data[kNestedCode]);
  weight.nested_offset = static_cast<float *>(data[kNestedOffset]);
  weight.codebook = static_cast<float *>(data[kCodebook]);
  return {};
}

struct Product {
  nf4_tensor weight;
  nf4_matmul_args args{};
};

// Fills in all of a product but y.
inline Checked read_product(const dl_tensor &x, const View &bias, const WeightViews &given,
                            Product &product) {
  if (Checked fault = check_first("x", x)) return fault;
  if (Checked fault = read_weight(given, x, product.weight)) return fault;
  const int64_t rows = product.weight.rows, cols = product.weight.cols;
  nf4_matmul_args &args = product.args;
  args.struct_size = sizeof args;
  args.dtype = dtype_of(&x);
  args.x = address_of(&x);
  args.y_stride = rows;
  if (!rows_of(&x, cols, &args.m, &args.x_stride))
    return Fault{"x", "elements in each row, and rows one distance apart", cols};
  if (!bias) return {};
  if (dtype_of(&*bias) != args.dtype || elements_of(&*bias) != rows ||
      !is_contiguous(&*bias, rows) || !has_memory(&*bias) || !beside(*bias, x))
    return Fault{"bias", "contiguous elements of x's dtype where x is", rows};
  args.bias = address_of(&*bias);
  return {};
}

}  // namespace nf4_torch

#endif
