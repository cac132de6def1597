// A model's weights where a backend reads them. 4-bit ones stay as the checkpoint has them: each is
// described to libnf4 by an nf4_tensor or an nf4_int4_tensor that points to its parts.
#pragma once

#include <nf4/nf4.h>

#include "checkpoint.hpp"

inline void check(nf4_status status) {
  require(status == NF4_STATUS_OK, nf4_status_string(status), ": ", nf4_last_error());
}

// One of three: nf4 or int4, of which struct_size is not 0, or dense.
struct Linear {
  int64_t rows, cols;
  nf4_tensor nf4{};
  nf4_int4_tensor int4{};
  const void *dense = nullptr, *bias = nullptr;
};

// Weights that multiply the same x; their outputs lie side by side in a row of y.
using Group = std::vector<Linear>;

// The products of a group: what one call of libnf4 computes for each kind, and what is dense.
struct Products {
  std::vector<const nf4_tensor *> nf4;
  std::vector<const nf4_int4_tensor *> int4;
  std::vector<const Linear *> dense;
  std::vector<nf4_matmul_args> nf4_args, int4_args, dense_args;

  template <class T>
  Products(const Group &group, const T *x, int64_t m, T *y) {
    nf4_matmul_args args{
        sizeof args, sizeof(T) == 4 ? NF4_DTYPE_FP32 : NF4_DTYPE_BF16, 0, m, x, 0, nullptr, y, 0,
        nullptr};
    for (const Linear &part : group) args.y_stride += part.rows;
    for (const Linear &part : group) {
      args.x_stride = part.cols;
      args.bias = part.bias;
      args.y = y;
      y += part.rows;
      if (part.nf4.struct_size) nf4.push_back(&part.nf4);
      if (part.int4.struct_size) int4.push_back(&part.int4);
      if (part.dense) dense.push_back(&part);
      (part.dense ? dense_args : part.int4.struct_size ? int4_args : nf4_args).push_back(args);
    }
  }
};

template <class Backend>
struct Loader {
  using T = typename Backend::T;

  const Checkpoint &checkpoint;
  const Json config;
  Backend &backend;

  template <class U>
  U *upload(const U *values, size_t count, const std::string &what) {
    U *memory = backend.template allocate<U>(count, what);
    backend.copy(memory, values, count * sizeof(U));
    return memory;
  }

  const T *dense(const std::string &name, const Shape &shape) {
    const View &view = checkpoint.tensor(name, shape);
    const bool is_half = view.dtype == "F16", is_float = view.dtype == "F32";
    require(is_half || is_float || view.dtype == "BF16", name, " is ", view.dtype,
            "; F32, BF16 and F16 are read");
    const int64_t bytes = is_float ? 4 : 2;
    const int64_t count = shape[0] * (shape.size() > 1 ? shape[1] : 1);
    require(view.bytes == count * bytes, name, " has ", view.bytes, " bytes");
    std::vector<T> values(count);
    for (size_t i = 0; i < values.size(); ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, view.data + i * bytes, bytes);
      if (is_half) bits = (bits & 0x8000) << 16 | (bits & 0x7fff) << 13;
      if (view.dtype == "BF16") bits <<= 16;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      values[i] = T(is_half ? value * 0x1p112f : value);
    }
    return upload(values.data(), values.size(), name);
  }

  Group group(const std::string &prefix, const std::vector<std::pair<std::string, int64_t>> &parts,
              int64_t cols, bool has_bias) {
    Group group;
    for (const auto &[part, rows] : parts) {
      const std::string name = prefix + part;
      Linear &linear = group.emplace_back(Linear{rows, cols});
      if (checkpoint.has(name + ".weight.quant_map"))
        linear.nf4 = nf4(name + ".weight", rows, cols);
      else if (checkpoint.has(name + ".qweight") || checkpoint.has(name + ".weight_packed"))
        linear.int4 = int4(name, rows, cols);
      else
        linear.dense = dense(name + ".weight", {rows, cols});
      if (has_bias) linear.bias = dense(name + ".bias", {rows});
    }
    return group;
  }

  // bitsandbytes: `name` holds the packed codes, its neighbours the scales, and JSON the rest.
  nf4_tensor nf4(const std::string &name, int64_t rows, int64_t cols) {
    const std::string key = name + ".quant_state.bitsandbytes__";
    const bool is_fp4 = checkpoint.has(key + "fp4");
    const View &state = checkpoint.tensor(key + (is_fp4 ? "fp4" : "nf4"));
    const Json json(key, {reinterpret_cast<const char *>(state.data), size_t(state.bytes)});
    require(json.size("shape/0") == rows && json.size("shape/1") == cols, name,
            " has another shape; expected ", text({rows, cols}));
    nf4_tensor tensor{};
    tensor.struct_size = sizeof tensor;
    tensor.format = is_fp4 ? NF4_FORMAT_FP4 : NF4_FORMAT_NF4;
    tensor.blocksize = static_cast<int32_t>(json.size("blocksize"));
    tensor.nested_blocksize = static_cast<int32_t>(json.size("nested_blocksize", "0"));
    tensor.rows = rows;
    tensor.cols = cols;
    nf4_sizes sizes{sizeof sizes, 0, 0, 0, 0, 0};
    check(nf4_tensor_sizes(&tensor, &sizes));
    tensor.packed = part(name, sizes.packed_bytes);
    tensor.absmax = part(name + ".absmax", sizes.absmax_bytes);
    const float *codebook = part<float>(name + ".quant_map", 64);
    if (std::memcmp(checkpoint.tensor(name + ".quant_map").data, nf4_codebook(tensor.format), 64))
      tensor.codebook = codebook;
    if (!tensor.nested_blocksize) return tensor;
    const auto offset = static_cast<float>(json.number("nested_offset"));
    tensor.nested_absmax = part<float>(name + ".nested_absmax", sizes.nested_blocks * 4);
    tensor.nested_code = part<float>(name + ".nested_quant_map", 1024);
    tensor.nested_offset = upload(&offset, 1, name);
    return tensor;
  }

  // compressed-tensors, or GPTQ and AWQ, whose names are the same.
  nf4_int4_tensor int4(const std::string &name, int64_t rows, int64_t cols) {
    const bool is_gptq = checkpoint.has(name + ".qweight");
    const std::string packed = name + (is_gptq ? ".qweight" : ".weight_packed"),
                      scales = name + (is_gptq ? ".scales" : ".weight_scale"),
                      zeros = name + (is_gptq ? ".qzeros" : ".weight_zero_point"),
                      g_idx = name + (is_gptq ? ".g_idx" : ".weight_g_idx");
    const View &view = checkpoint.tensor(scales);
    const int64_t groups = view.bytes / 2 / rows;
    require(view.dtype == "F16" || view.dtype == "BF16", scales, " is ", view.dtype,
            "; F16 and BF16 are read");
    require(groups > 0 && cols % groups == 0, scales, " has the shape ", text(view.shape));
    nf4_int4_tensor tensor{};
    tensor.struct_size = sizeof tensor;
    tensor.layout = is_gptq ? NF4_INT4_GPTQ : NF4_INT4_COMPRESSED_TENSORS;
    if (config.text("quantization_config/quant_method") == "awq") tensor.layout = NF4_INT4_AWQ;
    tensor.scales_dtype = view.dtype == "F16" ? NF4_DTYPE_FP16 : NF4_DTYPE_BF16;
    tensor.group_size = static_cast<int32_t>(cols / groups);
    tensor.rows = rows;
    tensor.cols = cols;
    nf4_int4_sizes sizes{sizeof sizes, 0, 0, 0, 0};
    check(nf4_int4_tensor_sizes(&tensor, &sizes));
    const int64_t row_words = (rows + 7) / 8, col_words = (cols + 7) / 8;
    const auto shape = [&](int64_t n, int64_t k) { return is_gptq ? Shape{k, n} : Shape{n, k}; };
    const bool is_awq = tensor.layout == NF4_INT4_AWQ;
    const uint8_t *codes = bytes_of(packed, sizes.packed_bytes,
                                    is_awq ? shape(row_words, cols) : shape(rows, col_words));
    tensor.scales = part(scales, sizes.scales_bytes, shape(rows, groups));
    if (checkpoint.has(zeros))
      tensor.zeros = part(zeros, sizes.zeros_bytes, shape(row_words, groups));
    tensor.zero_offset = tensor.zeros && tensor.layout == NF4_INT4_GPTQ &&
                         config.text("quantization_config/checkpoint_format", "gptq") == "gptq";
    // Act order: columns are sorted by group, here and once, so that products read whole groups.
    std::vector<int32_t> group_of(cols), plain(cols);
    for (int64_t k = 0; k < cols; ++k) group_of[k] = plain[k] = k / tensor.group_size;
    if (checkpoint.has(g_idx))
      std::memcpy(group_of.data(), bytes_of(g_idx, cols * 4, {cols}), cols * 4);
    if (group_of == plain) return tensor.packed = part(packed, sizes.packed_bytes), tensor;
    std::vector<int32_t> permutation = group_of;
    std::sort(permutation.begin(), permutation.end());
    require(permutation == plain, g_idx, ": groups are not of one size");
    std::vector<uint32_t> stored(sizes.packed_bytes / 4), sorted(stored.size());
    std::memcpy(stored.data(), codes, sizes.packed_bytes);
    nf4_int4_tensor from = tensor;
    from.packed = stored.data();
    from.g_idx = group_of.data();
    tensor.packed = sorted.data();
    tensor.permutation = permutation.data();
    check(nf4_int4_reorder_cpu(&from, &tensor, 0));
    tensor.packed = upload(sorted.data(), sorted.size(), packed);
    tensor.permutation = upload(permutation.data(), cols, g_idx);
    return tensor;
  }

  const uint8_t *bytes_of(const std::string &name, int64_t bytes, const Shape &shape = {}) {
    const View &view = checkpoint.tensor(name, shape);
    require(view.bytes == bytes, name, " has ", view.bytes, " bytes; expected ", bytes);
    return view.data;
  }
  // A part of a 4-bit weight. Where the backend reads host memory, it is read where it is mapped.
  template <class U = void>
  U *part(const std::string &name, int64_t bytes, const Shape &shape = {}) {
    auto *memory = const_cast<uint8_t *>(bytes_of(name, bytes, shape));
    if (!Backend::kReadsHost || reinterpret_cast<uintptr_t>(memory) % 4)
      memory = upload(memory, bytes, name);
    return reinterpret_cast<U *>(memory);
  }
};
