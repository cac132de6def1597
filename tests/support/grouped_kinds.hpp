// The gradient of grouped products, and experts of integers, in a GPU's memory: random cases, the
// expected results of every kernel, and their checks.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "core/float16.hpp"
#include "cuda/matmul_grouped/matmul_grouped.hpp"
#include "cuda/weight/transposed.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/families.hpp"
#include "support/force.hpp"
#include "support/forced_grouped.hpp"
#include "support/grouped_cases.hpp"
#include "support/launches.hpp"
#include "support/matmul_cases.hpp"
#include "validate.hpp"

namespace nf4::test {

// ---- The kinds of weight ------------------------------------------------------------------

struct GradientKind {
  using Host = HostWeight;
  using W = cuda::TransposedWeight;
  static constexpr bool kGradient = true;
  static constexpr auto launch = nf4_matmul_grouped_grad_launch;
  static constexpr auto workspace_size = nf4_matmul_grouped_grad_workspace_size;
  using Problem = GroupedProblem;
  static bool has(const nf4_tensor &, int) { return true; }
};
struct IntegerKind {
  using Host = HostInt4Weight;
  using W = Int4Weight;
  static constexpr bool kGradient = false;
  static constexpr auto launch = nf4_int4_matmul_grouped_launch;
  static constexpr auto workspace_size = nf4_int4_matmul_grouped_workspace_size;
  using Problem = Int4GroupedProblem;
  // Not all configurations exist for integers: skinny ones have no AWQ kernel.
  static bool has(nf4_int4_layout layout, int config) {
    return layout != NF4_INT4_AWQ || !cuda::is_skinny(config);
  }
  static bool has(const nf4_int4_tensor &weight, int config) { return has(weight.layout, config); }
};

// A stack of experts with its elements [E][N][K], and for each element the magnitude of its terms.
template <class Kind>
struct Experts {
  typename Kind::Host host;
  std::vector<float> elements, magnitudes;
};

inline HostWeight random_stack(Rng &rng, const CaseClass &kind, const GroupedShape &shape) {
  return plain_matmul_case(rng, kind, {shape.experts * shape.n, shape.k, 1}).weight;
}

inline Experts<GradientKind> experts_of(const HostWeight &stack) {
  Experts<GradientKind> experts;
  experts.host = stack;
  std::array<void *, kPartCount> addresses{};
  for (int part = 0; part < kPartCount; ++part)
    if (experts.host.has(Part(part))) addresses[part] = experts.host.bytes[part].data();
  const nf4_tensor tensor = experts.host.at(addresses);
  experts.elements.resize(experts.host.elements());
  REQUIRE(nf4_dequant_cpu(&tensor, experts.elements.data(), NF4_DTYPE_FP32, 1) == NF4_STATUS_OK);
  experts.magnitudes = experts.elements;
  return experts;
}

inline Experts<GradientKind> random_experts(Rng &rng, const CaseClass &kind,
                                            const GroupedShape &shape) {
  HostWeight stack = random_stack(rng, kind, shape);
  if (kind.byte_format == 0 && rng.one_in(3)) stack.shape.format = NF4_FORMAT_FP4;
  return experts_of(stack);
}

// The scales of every second expert, which are flat, are not finite.
inline Experts<GradientKind> experts_beside_scales_not_finite(Rng &rng, nf4_dtype dtype,
                                                              int blocksize,
                                                              const GroupedShape &shape) {
  HostWeight stack = random_stack(rng, {dtype, blocksize, false}, shape);
  const int64_t blocks = shape.n * shape.k / blocksize;  // per expert
  for (int64_t i = 0; i < shape.experts * blocks; ++i) {
    const float scale = rng.one_in(2) ? INFINITY : NAN;
    if (i / blocks % 2 != 0) std::memcpy(&stack.bytes[kAbsmax][i * 4], &scale, sizeof scale);
  }
  return experts_of(stack);
}

// A caller's codebook whose first entry is not finite. Every second expert does not use that entry,
// and lies between others that consist of it.
inline Experts<GradientKind> experts_beside_not_finite(Rng &rng, const CaseClass &kind,
                                                       const GroupedShape &shape) {
  HostWeight stack = random_stack(rng, kind, shape);
  stack.bytes[kCodebook] = random_own_codebook(rng, rng.one_in(2) ? INFINITY : NAN);
  const int64_t expert_bytes = shape.n * shape.k / 2;
  for (int64_t i = 0; i < shape.experts * expert_bytes; ++i) {
    uint8_t &codes = stack.bytes[kPacked][i];
    const bool without = i / expert_bytes % 2 == 0;
    if (without && codes / 16 == 0) codes |= 0x80;
    if (without && codes % 16 == 0) codes |= 0x08;
    if (!without && rng.one_in(2)) codes = 0;
  }
  return experts_of(stack);
}

inline Experts<IntegerKind> random_experts(Rng &rng, const Int4Class &kind,
                                           const GroupedShape &shape, int32_t group_size) {
  Experts<IntegerKind> experts;
  experts.host = random_int4_stack(rng, kind, {shape.n, shape.k, group_size}, shape.experts);
  for (int e = 0; e < shape.experts; ++e) {
    const HostInt4Weight one = expert_of(experts.host, shape.experts, e);
    for (auto [all, part] : {std::pair{&experts.elements, int4_elements(one)},
                             std::pair{&experts.magnitudes, int4_magnitudes(one)}})
      all->insert(all->end(), part.begin(), part.end());
  }
  return experts;
}

// ---- A product ----------------------------------------------------------------------------

// A matrix of normal 16-bit numbers, with NaN between its rows.
struct HostMatrix {
  nf4_dtype dtype;
  int64_t rows, cols, stride;
  std::vector<uint8_t> bytes;

  HostMatrix(Rng &rng, nf4_dtype of, int64_t rows_of, int64_t cols_of, int64_t stride_of)
      : dtype(of), rows(rows_of), cols(cols_of), stride(stride_of) {
    if (rows * cols != 0) bytes.assign(((rows - 1) * stride + cols) * 2, 0xff);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j) {
        const float value = rng.normal();
        const uint16_t bits = dtype == NF4_DTYPE_FP16 ? float_to_half(value) : float_to_bf16(value);
        std::memcpy(&bytes[(i * stride + j) * 2], &bits, 2);
      }
  }
  double operator()(int64_t i, int64_t j) const {
    return read_number(dtype, bytes.data(), i * stride + j);
  }
};

struct Sum {
  double value = 0, magnitude = 0, energy = 0;
};

template <class Kind>
struct Product {
  const Experts<Kind> &experts;
  GroupedRows rows;
  HostMatrix x, bias;
  int64_t y_cols, y_stride;
  bool has_bias;

  Product(Rng &rng, const Experts<Kind> &of, nf4_dtype dtype, const GroupedRows &routing)
      : experts(of),
        rows(routing),
        x(rng, dtype, rows.x_rows, Kind::kGradient ? rows.shape.n : rows.shape.k,
          (Kind::kGradient ? rows.shape.n : rows.shape.k) + rng.below(3) * 8),
        bias(rng, dtype, rows.shape.experts, rows.shape.n, rows.shape.n + rng.below(5)),
        y_cols(Kind::kGradient ? rows.shape.k : rows.shape.n),
        y_stride(row_stride(rng, y_cols)),
        has_bias(!Kind::kGradient && rng.one_in(2)) {}

  // For a row that has an expert.
  Sum expect(int64_t row, int64_t j) const {
    const int64_t expert = rows.expert_of(row), x_row = rows.x_row_of(row);
    Sum sum;
    if (has_bias) sum.value = bias(expert, j);
    sum.magnitude = std::fabs(sum.value);
    for (int64_t i = 0; i < x.cols && x_row >= 0; ++i) {
      const int64_t n = Kind::kGradient ? i : j, k = Kind::kGradient ? j : i;
      const int64_t at = (expert * rows.shape.n + n) * rows.shape.k + k;
      const double product = x(x_row, i) * double{experts.elements[at]};
      sum.value += product;
      sum.magnitude += std::fabs(x(x_row, i) * double{experts.magnitudes[at]});
      sum.energy += product * product;
    }
    const double scale = rows.row_scale.empty() ? 1 : double{rows.row_scale[row]};
    return {sum.value * scale, sum.magnitude * std::fabs(scale), sum.energy * scale * scale};
  }
};

// In a GPU's memory. With `aligned` on 256-byte boundaries, otherwise only sometimes.
template <class Kind>
struct Placed {
  const Product<Kind> &product;
  DeviceWeightOf<typename Kind::Host> weight;
  DeviceBuffer x, bias, y, ends, x_index, row_scale, workspace;

  Placed(Rng &rng, const Product<Kind> &of, bool aligned)
      : product(of),
        weight(rng, of.experts.host, aligned),
        x(of.x.bytes.size(), aligned ? 0 : random_lead(rng, 2)),
        bias(of.bias.bytes.size(), 64),
        y(of.rows.shape.m * of.y_cols == 0 ? 0
                                           : ((of.rows.shape.m - 1) * of.y_stride + of.y_cols) * 2,
          aligned ? 256 : random_lead(rng, 2)),
        ends(of.rows.ends.size() * 4, 64),
        x_index(of.rows.x_index.size() * 4, 64),
        row_scale(of.rows.row_scale.size() * 4, 64),
        workspace(workspace_bytes(), 64) {
    x.write(of.x.bytes.data());
    bias.write(of.bias.bytes.data());
    ends.write(of.rows.ends.data());
    x_index.write(of.rows.x_index.data());
    row_scale.write(of.rows.row_scale.data());
  }

  nf4_grouped_args args() const {
    const GroupedRows &rows = product.rows;
    nf4_grouped_args args{};
    args.struct_size = sizeof args;
    args.dtype = product.x.dtype;
    args.experts = rows.shape.experts;
    args.m = rows.shape.m;
    args.x = x.data();
    args.x_stride = product.x.stride;
    args.x_rows = rows.x_rows;
    args.y = y.data();
    args.y_stride = product.y_stride;
    args.ends = ends.data<int32_t>();
    if (!rows.x_index.empty()) args.x_index = x_index.data<int32_t>();
    if (product.has_bias) args.bias = bias.data();
    args.bias_stride = product.bias.stride;
    if (!rows.row_scale.empty()) args.row_scale = row_scale.data<float>();
    return args;
  }
  size_t workspace_bytes() const {
    size_t bytes = 0;
    const nf4_grouped_args given = args();
    REQUIRE(Kind::workspace_size(&weight.tensor(), &given, &bytes) == NF4_STATUS_OK);
    return bytes;
  }
  int used() const {
    const nf4_grouped_args given = args();
    typename Kind::Problem problem{};
    problem.gradient = Kind::kGradient;
    REQUIRE(validate_grouped_shape(&weight.tensor(), &given, problem) == NF4_STATUS_OK);
    REQUIRE(validate_grouped_operands(&weight.tensor(), &given, nullptr, 0, problem) ==
            NF4_STATUS_OK);
    int config;
    REQUIRE(cuda::matmul_grouped_config(problem, nullptr, config) == NF4_STATUS_OK);
    return config;
  }
  nf4_status multiply(cudaStream_t stream) const {
    const nf4_grouped_args given = args();
    return Kind::launch(&weight.tensor(), &given, workspace.data(), workspace.size(), stream);
  }
  bool leads_intact() const {
    return y.lead_intact() && workspace.lead_intact() && ends.lead_intact() && x.lead_intact() &&
           weight.leads_intact();
  }
};

// ---- Checks -------------------------------------------------------------------------------

// Checks each element, the memory between rows, and the average over all.
template <class Kind>
void check_y(const Product<Kind> &product, const std::vector<Sum> &expected,
             const std::vector<uint8_t> &y) {
  const double unit = product.x.dtype == NF4_DTYPE_BF16 ? 0x1p-8 : 0x1p-11;
  double squares = 0, energy = 0;
  for (int64_t row = 0; row < product.rows.shape.m; ++row) {
    if (product.rows.expert_of(row) < 0) continue;
    for (int64_t j = 0; j < product.y_cols; ++j) {
      const Sum &sum = expected[row * product.y_cols + j];
      const double got = read_number(product.x.dtype, y.data(), row * product.y_stride + j);
      const bool finite = std::isfinite(sum.value);
      if (!finite && !std::isfinite(got)) continue;
      const double error = got - sum.value;
      // The tolerance is a rounding of the weight, a quarter for its scale, and one of y.
      if (!finite ||
          !(std::fabs(error) <= unit * (1.25 * sum.magnitude + std::fabs(sum.value)) + 0x1p-20))
        FAIL("y[" << row << "][" << j << "] of expert " << product.rows.expert_of(row) << " is "
                  << got << ", expected " << sum.value << ", of the magnitude " << sum.magnitude);
      squares += error * error;
      energy += sum.energy + sum.value * sum.value;
    }
  }
  const double most = product.x.dtype == NF4_DTYPE_BF16 ? 4e-3 : 5e-4;
  REQUIRE(squares <= most * most * energy + 1e-12);
  for (int64_t i = 0; i < static_cast<int64_t>(y.size()); ++i)
    if (i / 2 % product.y_stride >= product.y_cols && y[i] != 0xa5)
      FAIL("between rows of y, byte " << i);
}

using Counts = std::map<const cuda::GpuFamily *, std::array<int, cuda::kMatmulConfigCount>>;

// Runs every kernel of every family that takes the product, aligned and as it comes.
template <class Kind>
void check_product(Rng &rng, const Product<Kind> &product, const Stream &stream, Counts &counts) {
  std::vector<Sum> expected(product.rows.shape.m * product.y_cols);
  for (int64_t i = 0; i < static_cast<int64_t>(expected.size()); ++i)
    if (product.rows.expert_of(i / product.y_cols) >= 0)
      expected[i] = product.expect(i / product.y_cols, i % product.y_cols);
  for (const bool aligned : {true, false}) {
    const Placed<Kind> placed(rng, product, aligned);
    for (const cuda::GpuFamily *family : runnable_families())
      for (int config = 0; config < cuda::kMatmulConfigCount; ++config) {
        INFO("family " << family->name << ", " << cuda::kMatmulConfigs[config].name);
        const ForcedGrouped forced(family, config);
        if (placed.used() != config) continue;
        ++counts[family][config];
        if (placed.y.size() != 0) fill_bytes(placed.y.data(), 0xa5, placed.y.size());
        REQUIRE(placed.multiply(stream) == NF4_STATUS_OK);
        stream.synchronize();
        check_y(product, expected, placed.y.read());
        REQUIRE(placed.leads_intact());
      }
  }
}

template <class Kind>
void check_counts(const Counts &counts, int least) {
  for (const cuda::GpuFamily *family : runnable_families())
    for (int config = 0; config < cuda::kMatmulConfigCount; ++config) {
      INFO("family " << family->name << ", " << cuda::kMatmulConfigs[config].name);
      if (cuda::matmul_grouped_has<typename Kind::W>(*family, config, compute_capability()))
        CHECK((counts.count(family) != 0 ? counts.at(family)[config] : 0) >= least);
    }
}

// Every kernel of each layout ran; with few shapes, every kernel of any layout.
inline void check_counts(const std::map<nf4_int4_layout, Counts> &of_layouts) {
  Counts all;
  for (const auto &[layout, counts] : of_layouts)
    for (const auto &[family, of_family] : counts)
      for (int config = 0; config < cuda::kMatmulConfigCount; ++config) {
        INFO("layout " << layout << ", family " << family->name << ", "
                       << cuda::kMatmulConfigs[config].name);
        if (!few_shapes() && IntegerKind::has(layout, config) &&
            cuda::matmul_grouped_has<Int4Weight>(*family, config, compute_capability()))
          CHECK(of_family[config] > 0);
        all[family][config] += of_family[config];
      }
  check_counts<IntegerKind>(all, few_shapes() ? 1 : 10);
}

// Runs every kernel of the product, forced, with each input late.
template <class Kind>
void check_late_inputs(Rng &rng, const Experts<Kind> &experts, const GroupedShape &shape,
                       const Stream &stream) {
  GroupedRows rows;
  do rows = random_grouped_rows(rng, shape, Routing::kAny);
  while (rows.x_index.empty() || rows.row_scale.empty() || rows.x_rows == 0);
  const Product<Kind> product(rng, experts, NF4_DTYPE_BF16, rows);
  const Placed<Kind> placed(rng, product, true);
  std::vector<DeviceBytes> inputs = parts_of(experts.host, placed.weight.tensor());
  for (const DeviceBytes &input :
       {bytes_of("x", placed.x), bytes_of("ends", placed.ends), bytes_of("x_index", placed.x_index),
        bytes_of("row_scale", placed.row_scale)})
    inputs.push_back(input);
  for (int config = 0; config < cuda::kMatmulConfigCount; ++config) {
    if (!cuda::matmul_grouped_has<typename Kind::W>(*runnable_families()[0], config,
                                                    compute_capability()))
      continue;
    if (!Kind::has(placed.weight.tensor(), config)) continue;
    INFO(cuda::kMatmulConfigs[config].name);
    const ForcedGrouped forced(runnable_families()[0], config);
    REQUIRE(placed.used() == config);
    check_waits(inputs, {bytes_of("y", placed.y)}, stream, [&] { return placed.multiply(stream); });
  }
}

}  // namespace nf4::test
