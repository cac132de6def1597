#include "support/matmul_cases.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "core/float16.hpp"

namespace nf4::test {
namespace {

constexpr int64_t kProducts = 400000;

void write_number(nf4_dtype dtype, uint8_t *data, int64_t i, float x) {
  if (dtype == NF4_DTYPE_FP32) {
    std::memcpy(data + 4 * i, &x, 4);
    return;
  }
  const uint16_t bits = dtype == NF4_DTYPE_FP16 ? float_to_half(x) : float_to_bf16(x);
  std::memcpy(data + 2 * i, &bits, 2);
}

float random_x(Rng &rng, XKind kind, bool not_finite_row) {
  constexpr float kNotFinite[] = {std::numeric_limits<float>::quiet_NaN(),
                                  std::numeric_limits<float>::infinity(),
                                  -std::numeric_limits<float>::infinity()};
  if (kind == XKind::kNotFinite && not_finite_row && rng.one_in(20)) return rng.pick(kNotFinite);
  if (kind == XKind::kOutliers && rng.one_in(50)) return 1e3f * rng.normal();
  if (kind == XKind::kShifted) return 0.5f + rng.normal();
  if (kind == XKind::kPositive) return 5 + rng.normal();
  return rng.normal();
}

size_t matrix_bytes(int64_t rows, int64_t cols, int64_t stride, nf4_dtype dtype) {
  return rows == 0 || cols == 0 ? 0 : ((rows - 1) * stride + cols) * dtype_bytes(dtype);
}

// Fills in everything except the weight and the dtype.
template <class Host>
void add_operands(Rng &rng, MatmulCaseOf<Host> &test, int64_t m, XKind x) {
  const int64_t rows = test.y_columns(), cols = test.x_columns();
  test.m = m;
  test.x_stride = row_stride(rng, cols);
  test.y_stride = row_stride(rng, rows);
  test.x.assign(matrix_bytes(test.m, cols, test.x_stride, test.dtype), 0xff);
  for (int64_t row = 0; row < test.m; ++row) {
    const bool not_finite = rng.one_in(3);
    for (int64_t k = 0; k < cols; ++k)
      write_number(test.dtype, test.x.data(), row * test.x_stride + k,
                   random_x(rng, x, not_finite));
  }
  if (rng.one_in(2) && !test.gradient) {
    test.bias.resize(rows * dtype_bytes(test.dtype));
    for (int64_t i = 0; i < rows; ++i) write_number(test.dtype, test.bias.data(), i, rng.normal());
  }
}

template <class Host>
std::string describe_rows(const MatmulCaseOf<Host> &test) {
  return std::string(test.gradient ? ", gradient" : "") + ", m " + std::to_string(test.m) +
         ", strides " + std::to_string(test.x_stride) + " and " + std::to_string(test.y_stride) +
         (test.bias.empty() ? "" : ", bias");
}

}  // namespace

template <class Host>
size_t MatmulCaseOf<Host>::y_bytes() const {
  return matrix_bytes(m, y_columns(), y_stride, dtype);
}

template <class Host>
nf4_matmul_args MatmulCaseOf<Host>::args(const void *x_address, const void *bias_address,
                                         void *y) const {
  nf4_matmul_args args{};
  args.struct_size = sizeof args;
  args.dtype = dtype;
  args.m = m;
  args.x = x_address;
  args.x_stride = x_stride;
  args.bias = bias.empty() ? nullptr : bias_address;
  args.y = y;
  args.y_stride = y_stride;
  return args;
}

int64_t row_stride(Rng &rng, int64_t cols) {
  const int64_t stride = cols + (rng.one_in(2) ? 0 : rng.below(40));
  return cols % 8 == 0 && rng.one_in(2) ? stride / 8 * 8 : stride;
}

MatmulShape random_matmul_shape(Rng &rng) {
  MatmulShape shape{rng.between(1, 40), rng.between(1, 700), rng.between(1, 6)};
  if (rng.one_in(3)) shape.m = rng.between(1, 30);
  if (rng.one_in(10)) shape.m = rng.between(90, 200);
  if (rng.one_in(6)) shape.cols = rng.between(1, 12000);
  if (rng.one_in(2)) shape.cols = (shape.cols + 31) / 32 * 32;
  if (rng.one_in(8)) shape.rows = rng.between(60, 300);
  shape.rows = std::min(shape.rows, std::max<int64_t>(1, kProducts / (shape.cols * shape.m)));
  return shape;
}

MatmulCase random_matmul_case(Rng &rng, const CaseClass &kind, CodebookKind codebook,
                              const MatmulShape &shape, XKind x) {
  MatmulCase test{};
  test.dtype = kind.dtype;
  if (kind.byte_format != 0) {
    const int64_t blocks = (shape.cols + kind.blocksize - 1) / kind.blocksize;
    test.weight =
        random_byte_weight(rng, kind, shape.rows, blocks * kind.blocksize, x != XKind::kNotFinite);
  } else {
    test.weight = random_dequant_case(rng, kind, codebook, shape.rows * shape.cols).weight;
    test.weight.shape.rows = shape.rows;
    test.weight.shape.cols = shape.cols;
  }
  test.gradient = shape.gradient;
  add_operands(rng, test, shape.m, x);
  return test;
}

MatmulCase plain_matmul_case(Rng &rng, const CaseClass &kind, const MatmulShape &shape) {
  constexpr int kMostNestedBlocksize = 4096;
  MatmulCase test;
  do test = random_matmul_case(rng, kind, CodebookKind::kNf4, shape, XKind::kOrdinary);
  while (test.x_stride % 8 != 0 || test.weight.shape.nested_blocksize > kMostNestedBlocksize);
  if (kind.byte_format != 0) return test;
  const auto fill = [&](Part part, float least) {
    std::vector<uint8_t> &bytes = test.weight.bytes[part];
    for (size_t i = 0; i < bytes.size(); i += sizeof(float)) {
      const float number = least + rng.uniform();
      std::memcpy(&bytes[i], &number, sizeof number);
    }
  };
  fill(kind.nested ? kNestedAbsmax : kAbsmax, 0.5f);
  if (!kind.nested) return test;
  fill(kNestedOffset, 2.0f);
  std::memcpy(test.weight.bytes[kNestedCode].data(), nf4_scale_code(), 256 * sizeof(float));
  return test;
}

Int4MatmulCase random_int4_matmul_case(Rng &rng, const Int4Class &kind, const Int4Shape &shape,
                                       nf4_dtype dtype, int64_t m, XKind x, bool ordinary_scales) {
  Int4MatmulCase test{};
  test.dtype = dtype;
  test.weight = random_int4_weight(rng, kind, shape, ordinary_scales);
  add_operands(rng, test, m, x);
  return test;
}

template <class Host>
void repeat_rows(MatmulCaseOf<Host> &test, Rng &rng, int64_t distinct) {
  const int bytes = dtype_bytes(test.dtype);
  const auto row = [&](int64_t i) { return test.x.data() + i * test.x_stride * bytes; };
  for (int64_t i = distinct; i < test.m; ++i)
    std::memcpy(row(i), row(rng.below(distinct)), test.x_columns() * bytes);
}

std::string describe(const MatmulCase &test, uint64_t stream) {
  return describe(test.weight, test.dtype, stream) + describe_rows(test);
}
std::string describe(const Int4MatmulCase &test, uint64_t stream) {
  constexpr const char *kNames[] = {", fp32", ", fp16", ", bf16"};
  return describe(test.weight, stream) + kNames[test.dtype - 1] + describe_rows(test);
}

double read_number(nf4_dtype dtype, const void *data, int64_t i) {
  if (dtype == NF4_DTYPE_FP32) return static_cast<const float *>(data)[i];
  const uint16_t bits = static_cast<const uint16_t *>(data)[i];
  return dtype == NF4_DTYPE_FP16 ? half_to_float(bits) : bf16_to_float(bits);
}

double round_to(nf4_dtype dtype, double x) {
  const float single = static_cast<float>(x);
  if (dtype == NF4_DTYPE_FP32) return single;
  return dtype == NF4_DTYPE_FP16 ? half_to_float(float_to_half(single))
                                 : bf16_to_float(float_to_bf16(single));
}

template struct MatmulCaseOf<HostWeight>;
template struct MatmulCaseOf<HostInt4Weight>;
template void repeat_rows(MatmulCase &, Rng &, int64_t);
template void repeat_rows(Int4MatmulCase &, Rng &, int64_t);

}  // namespace nf4::test
