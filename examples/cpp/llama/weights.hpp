// A model's weights where a backend reads them. 4-bit ones stay as the checkpoint has them: each is
// described to libnf4 by an nf4_tensor or an nf4_int4_tensor that points to its parts.
#pragma once

#include <nf4/nf4.h>

#include "config.hpp"

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
struct Group {
  std::vector<Linear> parts;
  int64_t rows = 0;
};

// The products of a group: what one call of libnf4 computes for each kind, and what is dense.
struct Products {
  std::vector<const nf4_tensor *> nf4;
  std::vector<const nf4_int4_tensor *> int4;
  std::vector<const Linear *> dense;
  std::vector<nf4_matmul_args> nf4_args, int4_args, dense_args;

  template <class T>
  Products(const Group &group, nf4_dtype dtype, const T *x, int64_t m, T *y) {
    for (const Linear &part : group.parts) {
      const nf4_matmul_args args{sizeof args, dtype,     0, m,          x,
                                 part.cols,   part.bias, y, group.rows, nullptr};
      if (part.nf4.struct_size) {
        nf4.push_back(&part.nf4);
        nf4_args.push_back(args);
      } else if (part.int4.struct_size) {
        int4.push_back(&part.int4);
        int4_args.push_back(args);
      } else {
        dense.push_back(&part);
        dense_args.push_back(args);
      }
      if (y) y += part.rows;
    }
  }
};

template <class Backend>
class Loader {
 public:
  using T = typename Backend::T;

  Loader(const Checkpoint &checkpoint, const Config &config, Backend &backend)
      : checkpoint_(checkpoint), config_(config), backend_(backend) {}

  template <class U>
  U *upload(const U *values, size_t count, const std::string &what) {
    U *memory = backend_.template allocate<U>(count, what);
    backend_.upload(memory, values, count);
    return memory;
  }

  const T *dense(const std::string &name, const Shape &shape) {
    const View &view = checkpoint_.tensor(name, shape);
    const bool is_half = view.dtype == "F16", is_float = view.dtype == "F32";
    require(is_half || is_float || view.dtype == "BF16", name, " is ", view.dtype,
            "; F32, BF16 and F16 are read");
    const size_t bytes = is_float ? 4 : 2;
    std::vector<T> values(view.bytes / bytes);
    int64_t expected = bytes;
    for (const int64_t size : shape) expected *= size;
    require(int64_t(view.bytes) == expected, name, " has ", view.bytes, " bytes");
    for (size_t i = 0; i < values.size(); ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, view.data + i * bytes, bytes);
      if (is_half)
        bits = (bits & 0x8000) << 16 | (bits & 0x7fff) << 13;
      else if (!is_float)
        bits <<= 16;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      values[i] = static_cast<T>(is_half ? value * 0x1p112f : value);
    }
    return upload(values.data(), values.size(), name);
  }

  Group group(const std::string &prefix, const std::vector<std::pair<std::string, int64_t>> &parts,
              int64_t cols, bool bias) {
    Group group;
    for (const auto &[name, rows] : parts) {
      group.parts.push_back(linear(prefix + name, rows, cols));
      if (bias) group.parts.back().bias = dense(prefix + name + ".bias", {rows});
      group.rows += rows;
    }
    return group;
  }

 private:
  Linear linear(const std::string &name, int64_t rows, int64_t cols) {
    Linear linear{rows, cols};
    const std::string weight = name + ".weight", state = weight + ".quant_state.bitsandbytes__";
    if (checkpoint_.has(state + "nf4"))
      linear.nf4 = nf4(weight, state + "nf4", NF4_FORMAT_NF4, rows, cols);
    else if (checkpoint_.has(state + "fp4"))
      linear.nf4 = nf4(weight, state + "fp4", NF4_FORMAT_FP4, rows, cols);
    else if (checkpoint_.has(weight + "_packed") || checkpoint_.has(name + ".qweight"))
      linear.int4 = int4(name, rows, cols);
    else
      linear.dense = dense(weight, {rows, cols});
    return linear;
  }

  // bitsandbytes: `name` holds the packed codes, its neighbours the scales, and JSON the rest.
  nf4_tensor nf4(const std::string &name, const std::string &state, nf4_format format, int64_t rows,
                 int64_t cols) {
    const View &text = checkpoint_.tensor(state);
    const Json json(state, {reinterpret_cast<const char *>(text.data), text.bytes});
    require(json.size("shape/0") == rows && json.size("shape/1") == cols, name,
            " has another shape; expected ", Shape{rows, cols});
    nf4_tensor tensor{};
    tensor.struct_size = sizeof tensor;
    tensor.format = format;
    tensor.blocksize = static_cast<int32_t>(json.size("blocksize"));
    tensor.nested_blocksize =
        json.has("nested_blocksize") ? static_cast<int32_t>(json.size("nested_blocksize")) : 0;
    tensor.rows = rows;
    tensor.cols = cols;
    nf4_sizes sizes{};
    sizes.struct_size = sizeof sizes;
    check(nf4_tensor_sizes(&tensor, &sizes));
    tensor.packed = part(name, sizes.packed_bytes);
    tensor.absmax = part(name + ".absmax", sizes.absmax_bytes);
    const View &codebook = checkpoint_.tensor(name + ".quant_map");
    if (codebook.bytes != 64 || std::memcmp(codebook.data, nf4_codebook(format), 64) != 0)
      tensor.codebook = static_cast<float *>(part(codebook.name, 64));
    if (tensor.nested_blocksize) {
      const auto offset = static_cast<float>(json.number("nested_offset"));
      tensor.nested_absmax =
          static_cast<float *>(part(name + ".nested_absmax", sizes.nested_blocks * 4));
      tensor.nested_code = static_cast<float *>(part(name + ".nested_quant_map", 1024));
      tensor.nested_offset = upload(&offset, 1, name);
    }
    return tensor;
  }

  // compressed-tensors, or GPTQ and AWQ, whose names are the same.
  nf4_int4_tensor int4(const std::string &name, int64_t rows, int64_t cols) {
    const bool compressed = checkpoint_.has(name + ".weight_packed");
    const std::string packed = name + (compressed ? ".weight_packed" : ".qweight");
    const std::string zeros = name + (compressed ? ".weight_zero_point" : ".qzeros");
    const std::string g_idx = name + (compressed ? ".weight_g_idx" : ".g_idx");
    const View &scales = checkpoint_.tensor(name + (compressed ? ".weight_scale" : ".scales"));
    const int64_t groups = static_cast<int64_t>(scales.bytes) / 2 / rows;
    require(scales.dtype == "F16" || scales.dtype == "BF16", scales.name, " is ", scales.dtype,
            "; F16 and BF16 are read");
    require(groups > 0 && cols % groups == 0, scales.name, " has another shape");
    nf4_int4_tensor tensor{};
    tensor.struct_size = sizeof tensor;
    tensor.layout = compressed       ? NF4_INT4_COMPRESSED_TENSORS
                    : config_.is_awq ? NF4_INT4_AWQ
                                     : NF4_INT4_GPTQ;
    tensor.scales_dtype = scales.dtype == "F16" ? NF4_DTYPE_FP16 : NF4_DTYPE_BF16;
    tensor.group_size = static_cast<int32_t>(cols / groups);
    tensor.rows = rows;
    tensor.cols = cols;
    nf4_int4_sizes sizes{};
    sizes.struct_size = sizeof sizes;
    check(nf4_int4_tensor_sizes(&tensor, &sizes));
    const View &view = checkpoint_.tensor(packed, compressed       ? Shape{rows, (cols + 7) / 8}
                                                  : config_.is_awq ? Shape{cols, rows / 8}
                                                                   : Shape{cols / 8, rows});
    tensor.packed = part(packed, sizes.packed_bytes);
    tensor.scales = part(scales.name, sizes.scales_bytes);
    if (checkpoint_.has(zeros)) {
      tensor.zeros = part(zeros, sizes.zeros_bytes);
      tensor.zero_offset = tensor.layout == NF4_INT4_GPTQ && !config_.is_gptq_v2;
    }
    if (checkpoint_.has(g_idx)) reorder(tensor, view, g_idx);
    return tensor;
  }

  // Act order: columns sorted by group once, here, so that products read whole groups.
  void reorder(nf4_int4_tensor &tensor, const View &packed, const std::string &name) {
    const View &view = checkpoint_.tensor(name, {tensor.cols});
    std::vector<int32_t> g_idx(tensor.cols), permutation(tensor.cols);
    require(view.bytes == g_idx.size() * 4, name, " is ", view.dtype, "; I32 is read");
    std::memcpy(g_idx.data(), view.data, view.bytes);
    std::vector<int32_t> plain = g_idx;
    std::sort(plain.begin(), plain.end());
    for (int64_t k = 0; k < tensor.cols; ++k)
      require(plain[k] == k / tensor.group_size, name, ": groups are not of one size");
    if (g_idx == plain) return;
    std::vector<uint32_t> stored(packed.bytes / 4), sorted(stored.size());
    std::memcpy(stored.data(), packed.data, packed.bytes);
    nf4_int4_tensor from = tensor, to = tensor;
    from.packed = stored.data();
    from.g_idx = g_idx.data();
    to.packed = sorted.data();
    to.permutation = permutation.data();
    check(nf4_int4_reorder_cpu(&from, &to, 0));
    tensor.packed = upload(sorted.data(), sorted.size(), name);
    tensor.permutation = upload(permutation.data(), permutation.size(), name);
  }

  void *part(const std::string &name, int64_t bytes) {
    const View &view = checkpoint_.tensor(name);
    require(int64_t(view.bytes) == bytes, name, " has ", view.bytes, " bytes; expected ", bytes);
    return backend_.place(view);
  }

  const Checkpoint &checkpoint_;
  const Config &config_;
  Backend &backend_;
};
