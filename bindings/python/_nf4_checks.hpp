// Turns the views of a call's tensors into arguments of libnf4, and finds the argument that libnf4
// does not accept.
#ifndef NF4_CHECKS_HPP
#define NF4_CHECKS_HPP

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "_nf4_dlpack.h"
#include "nf4/nf4.h"

namespace nf4_torch {

enum Part { kPacked, kAbsmax, kNestedAbsmax, kNestedCode, kNestedOffset, kCodebook };
enum Int4Part { kInt4Packed, kScales, kZeros, kGIdx, kPermutation };

// A kind of weight: its descriptor, and the names of its tensors. Every weight has the first
// kNeeded of them. Python's tuple for a weight has the tensors and then a Spec.
struct Codebook {
  using Descriptor = nf4_tensor;
  static constexpr int kParts = 6, kNeeded = 2;
  static constexpr const char *kNames[kParts] = {"packed",      "absmax",        "nested_absmax",
                                                 "nested_code", "nested_offset", "codebook"};
};
struct Int4 {
  using Descriptor = nf4_int4_tensor;
  static constexpr int kParts = 5, kNeeded = 2;
  static constexpr const char *kNames[kParts] = {"packed", "scales", "zeros", "g_idx",
                                                 "permutation"};
};

using View = std::optional<dl_tensor>;

// A weight as an entry views it. The numbers are the first of a Spec, in its order.
template <class Kind>
struct WeightViews {
  std::array<View, Kind::kParts> parts;
  std::array<int64_t, 5> spec;
  int64_t packed_bytes;  // the shape of `packed` if it is viewed as bytes
};

// The argument that the body does not accept, and what it expects: `count`, if any, and words.
struct Fault {
  const char *argument, *expected;
  int64_t count = -1;

  std::string text() const {
    const std::string number = count < 0 ? "" : std::to_string(count) + " ";
    return std::string(argument) + " is something else; expected " + number + expected;
  }
};
using Checked = std::optional<Fault>;  // empty: no fault

// Tells whether a tensor is on the device of the call's first tensor.
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

inline Checked check_shape(int64_t rows, int64_t cols) {
  if (rows < 0 || cols < 0) return Fault{"shape", "no less than 0"};
  if (rows > 0 && cols > INT64_MAX / rows) return Fault{"shape", "fewer than 2^63 elements"};
  return {};
}

// The format of a Spec has the scale_rule above its 8 low bits: the arguments of an operator, which
// graphs on disk have, stay what they are.
constexpr int kScaleRuleShift = 8;
constexpr int64_t kFormatMask = (1 << kScaleRuleShift) - 1;

inline Checked read_spec(const std::array<int64_t, 5> &spec, nf4_tensor &weight) {
  const auto [rows, cols, format, blocksize, nested_blocksize] = spec;
  if (Checked fault = check_shape(rows, cols)) return fault;
  if (!fits(format, 0)) return Fault{"format", "0 to 2^31 - 1"};
  if (!fits(blocksize, 1)) return Fault{"blocksize", "1 to 2^31 - 1"};
  if (!fits(nested_blocksize, 0)) return Fault{"nested_blocksize", "0 to 2^31 - 1"};
  weight = {};
  weight.struct_size = sizeof weight;
  weight.rows = rows;
  weight.cols = cols;
  weight.format = static_cast<nf4_format>(format & kFormatMask);
  weight.scale_rule = static_cast<int32_t>(format >> kScaleRuleShift);
  weight.blocksize = static_cast<int32_t>(blocksize);
  weight.nested_blocksize = static_cast<int32_t>(nested_blocksize);
  return {};
}

// The elements of nested_absmax in NVFP4.
inline int64_t global_scales(const nf4_tensor &weight) {
  if (weight.rows == 0 || weight.cols == 0) return 0;
  return weight.nested_blocksize == 0 ? 1 : divide_up(weight.rows, weight.nested_blocksize);
}

// Fills in the descriptor of a weight whose parts are on the device of `first`.
inline Checked read_weight(const WeightViews<Codebook> &given, const dl_tensor &first,
                           nf4_tensor &weight) {
  if (Checked fault = read_spec(given.spec, weight)) return fault;
  const int64_t elements = weight.rows * weight.cols;
  const int64_t blocks = divide_up(elements, weight.blocksize);
  const bool of_nvfp4 = weight.format == NF4_FORMAT_NVFP4;
  const bool scale_bytes = of_nvfp4 || weight.format == NF4_FORMAT_MXFP4;
  const bool nested = weight.nested_blocksize != 0 && !scale_bytes;
  const int64_t nested_blocks = of_nvfp4 ? global_scales(weight)
                                : nested ? divide_up(blocks, weight.nested_blocksize)
                                         : 0;
  const int64_t counts[Codebook::kParts] = {
      divide_up(elements, 2), blocks, nested_blocks, 256, 1, 16};
  void *data[Codebook::kParts] = {};
  for (int i = 0; i < Codebook::kParts; ++i) {
    const View &view = given.parts[i];
    const bool of_nested = i >= kNestedAbsmax && i <= kNestedOffset;
    const bool wanted = nested || (of_nvfp4 && i == kNestedAbsmax);
    if ((of_nested && !wanted) || (i == kCodebook && !view)) continue;
    if (!view) return Fault{Codebook::kNames[i], "a tensor, as the weight is nested"};
    const bool bytes = i == kPacked || (i == kAbsmax && (nested || scale_bytes));
    if (!is_part(&*view, counts[i], bytes) || !has_memory(&*view) || !beside(*view, first))
      return Fault{Codebook::kNames[i], "contiguous elements where the others are", counts[i]};
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

inline Checked read_spec(const std::array<int64_t, 5> &spec, nf4_int4_tensor &weight) {
  const auto [rows, cols, layout, zero_offset, group_size] = spec;
  if (Checked fault = check_shape(rows, cols)) return fault;
  if (!fits(layout, 0)) return Fault{"layout", "0 to 2^31 - 1"};
  if (!fits(zero_offset, 0)) return Fault{"zero_offset", "0 to 2^31 - 1"};
  if (group_size != -1 && (!fits(group_size, 1) || cols % group_size != 0))
    return Fault{"group_size", "-1, or a number that divides the columns"};
  weight = {};
  weight.struct_size = sizeof weight;
  weight.rows = rows;
  weight.cols = cols;
  weight.layout = static_cast<nf4_int4_layout>(layout);
  weight.zero_offset = static_cast<int32_t>(zero_offset);
  weight.group_size = static_cast<int32_t>(group_size);
  return {};
}

// The extents of a part; with cols -1 it has one dimension.
struct Extents {
  int64_t rows, cols;

  bool are_of(const dl_tensor &view) const {
    return view.ndim == (cols < 0 ? 1 : 2) && view.shape[0] == rows &&
           (cols < 0 || view.shape[1] == cols) && is_contiguous(&view, elements_of(&view));
  }
};

// The extents of the parts in their order; include/nf4/nf4.h has the table.
inline std::array<Extents, Int4::kParts> extents_of(const nf4_int4_tensor &weight) {
  const int64_t rows = weight.rows, cols = weight.cols;
  const int64_t groups = weight.group_size == -1 ? 1 : cols / weight.group_size;
  const int64_t row_words = divide_up(rows, 8), col_words = divide_up(cols, 8);
  const Extents of_row{cols, -1};
  if (weight.layout == NF4_INT4_COMPRESSED_TENSORS)
    return {{{rows, col_words}, {rows, groups}, {row_words, groups}, of_row, of_row}};
  const Extents packed =
      weight.layout == NF4_INT4_AWQ ? Extents{cols, row_words} : Extents{col_words, rows};
  return {{packed, {groups, rows}, {groups, row_words}, of_row, of_row}};
}

inline bool is_words(const dl_tensor &view) {
  return view.lanes == 1 && view.code == DL_INT && view.bits == 32;
}

inline Checked read_weight(const WeightViews<Int4> &given, const dl_tensor &first,
                           nf4_int4_tensor &weight) {
  if (Checked fault = read_spec(given.spec, weight)) return fault;
  const auto extents = extents_of(weight);
  void *data[Int4::kParts] = {};
  for (int i = 0; i < Int4::kParts; ++i) {
    const View &view = given.parts[i];
    if (!view && i >= Int4::kNeeded) continue;
    if (!view || !extents[i].are_of(*view) || !has_memory(&*view) || !beside(*view, first))
      return Fault{Int4::kNames[i], "a contiguous tensor of the layout's shape where x is"};
    if (i == kScales) {
      weight.scales_dtype = dtype_of(&*view);
      if (weight.scales_dtype != NF4_DTYPE_FP16 && weight.scales_dtype != NF4_DTYPE_BF16)
        return Fault{"scales", "float16 or bfloat16"};
    } else if (!is_words(*view)) {
      return Fault{Int4::kNames[i], "int32"};
    }
    data[i] = const_cast<char *>(address_of(&*view));
  }
  if (!given.parts[kZeros]) weight.zero_offset = 0;
  weight.packed = data[kInt4Packed];
  weight.scales = data[kScales];
  weight.zeros = data[kZeros];
  weight.g_idx = static_cast<const int32_t *>(data[kGIdx]);
  weight.permutation = static_cast<const int32_t *>(data[kPermutation]);
  return {};
}

template <class Kind>
struct Product {
  typename Kind::Descriptor weight;
  nf4_matmul_args args{};
};

// Fills in everything of a product except y.
template <class Kind>
Checked read_product(const dl_tensor &x, const View &bias, const WeightViews<Kind> &given,
                     Product<Kind> &product) {
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

// Does the same for a gradient, whose x is dY and whose y is dX.
inline Checked read_gradient(const dl_tensor &grad_y, const WeightViews<Codebook> &given,
                             Product<Codebook> &product) {
  if (Checked fault = check_first("grad_y", grad_y)) return fault;
  if (Checked fault = read_weight(given, grad_y, product.weight)) return fault;
  nf4_matmul_args &args = product.args;
  args.struct_size = sizeof args;
  args.dtype = dtype_of(&grad_y);
  args.x = address_of(&grad_y);
  args.y_stride = product.weight.cols;
  const int64_t rows = product.weight.rows;
  if (!rows_of(&grad_y, rows, &args.m, &args.x_stride))
    return Fault{"grad_y", "elements in each row, and rows one distance apart", rows};
  return {};
}

constexpr int64_t kMostRank = 128;

struct AdapterViews {
  View a, b;
  double scale;
};

// Fills in everything of an adapter except its product, and adds it to a product whose x is
// `first`.
inline Checked read_adapter(const AdapterViews &given, const dl_tensor &first,
                            Product<Codebook> &product, nf4_lora &lora) {
  const auto [rows, cols] = std::pair(product.weight.rows, product.weight.cols);
  const dl_tensor &a = *given.a, &b = *given.b;
  int64_t rank = 0, rows_of_b = 0;
  lora = {};
  lora.struct_size = sizeof lora;
  lora.dtype = dtype_of(&a);
  lora.scale = static_cast<float>(given.scale);
  if (!rows_of(&a, cols, &rank, &lora.a_stride) || rank < 1 || rank > kMostRank)
    return Fault{"a", "columns, and 1 to 128 rows", cols};
  if (!rows_of(&b, rank, &rows_of_b, &lora.b_stride) || rows_of_b != rows)
    return Fault{"b", "rows, and a column for each row of a", rows};
  const bool allowed = lora.dtype == product.args.dtype || lora.dtype == NF4_DTYPE_FP32;
  if (!allowed || dtype_of(&b) != lora.dtype) return Fault{"a", "of x's dtype or float32, as b is"};
  for (const dl_tensor *each : {&a, &b})
    if (!has_memory(each) || !beside(*each, first)) return Fault{"a", "where x is, as b is"};
  lora.rank = static_cast<int32_t>(rank);
  lora.a = address_of(&a);
  lora.b = address_of(&b);
  product.args.lora = &lora;
  return {};
}

// Reads x or dY of an adapter's gradients, [..., columns]; returns false if libnf4 does not accept
// it.
inline bool read_wide(const dl_tensor &view, const dl_tensor &first, const nf4_lora_grad_args &args,
                      const void *&data, int64_t &columns, int64_t &stride) {
  if (view.ndim < 1) return false;
  int64_t m = 0;
  data = address_of(&view);
  columns = view.shape[view.ndim - 1];
  return rows_of(&view, columns, &m, &stride) && m == args.m && dtype_of(&view) == args.dtype &&
         has_memory(&view) && beside(view, first);
}

// Reads p or q, [..., rank].
inline bool read_narrow(const dl_tensor &view, const dl_tensor &first,
                        const nf4_lora_grad_args &args, const void *&data) {
  int64_t rank = 0, stride = 0;
  return read_wide(view, first, args, data, rank, stride) && rank == args.rank &&
         is_contiguous(&view, args.m * rank);
}

// Fills in everything of an adapter's gradients except q and the outputs, which are contiguous and
// in the dtype of the adapter. Returns false if libnf4 does not accept it.
inline bool read_lora_grad(const dl_tensor &grad_y, const dl_tensor &x, const dl_tensor &p,
                           const AdapterViews &given, nf4_lora_grad_args &args) {
  const dl_tensor &a = *given.a, &b = *given.b;
  const int64_t rank = p.ndim < 1 ? 0 : p.shape[p.ndim - 1];
  if (rank < 1 || rank > kMostRank) return false;
  args = {};
  args.struct_size = sizeof args;
  args.dtype = dtype_of(&grad_y);
  args.grad_dtype = dtype_of(&a);
  args.rank = static_cast<int32_t>(rank);
  args.scale = static_cast<float>(given.scale);
  args.m = elements_of(&p) / rank;
  if (args.dtype == 0 || (args.grad_dtype != args.dtype && args.grad_dtype != NF4_DTYPE_FP32) ||
      dtype_of(&b) != args.grad_dtype || !beside(a, grad_y) || !beside(b, grad_y) ||
      !read_wide(grad_y, grad_y, args, args.dy, args.rows, args.dy_stride) ||
      !read_wide(x, grad_y, args, args.x, args.cols, args.x_stride) ||
      !read_narrow(p, grad_y, args, args.p))
    return false;
  args.da_stride = args.cols;
  args.db_stride = rank;
  return true;
}

}  // namespace nf4_torch

#endif
