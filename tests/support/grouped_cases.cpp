#include "support/grouped_cases.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace nf4::test {
namespace {

constexpr int64_t kProducts = 300000;

// The rows of m that each expert has.
std::vector<int32_t> random_ends(Rng &rng, const GroupedShape &shape, Routing routing) {
  std::vector<int32_t> ends(shape.experts, 0);
  if (shape.experts == 0) return ends;
  int64_t m = shape.m;
  if (routing == Routing::kPartial) m = rng.one_in(3) ? 0 : rng.between(0, m);
  const int64_t one = rng.below(shape.experts), apart = rng.between(2, 5);
  for (int64_t row = 0; row < m; ++row) {
    int64_t expert = rng.below(shape.experts);
    if (routing == Routing::kOne) expert = one;
    if (routing == Routing::kFew) expert = expert / apart * apart;
    ++ends[expert];
  }
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  if (routing != Routing::kBad) return ends;
  constexpr int32_t kWrong[] = {-1, INT32_MIN, INT32_MAX, 0, 1};
  for (int32_t &end : ends)
    if (rng.one_in(3)) end = rng.one_in(2) ? rng.pick(kWrong) : end + 7;
  return ends;
}

std::vector<int32_t> random_index(Rng &rng, int64_t m, int64_t x_rows) {
  constexpr int32_t kWrong[] = {-1, INT32_MIN, INT32_MAX};
  std::vector<int32_t> index(m);
  const bool wrong = rng.one_in(2);
  for (int32_t &row : index) {
    row = x_rows == 0 ? 0 : static_cast<int32_t>(rng.below(x_rows));
    if (wrong && rng.one_in(5))
      row = rng.one_in(3) ? static_cast<int32_t>(x_rows) : rng.pick(kWrong);
  }
  return index;
}

}  // namespace

size_t GroupedCase::y_bytes() const {
  if (shape.m == 0 || shape.n == 0) return 0;
  return ((shape.m - 1) * y_stride + shape.n) * dtype_bytes(all.dtype);
}

int32_t GroupedRows::expert_of(int64_t row) const {
  for (size_t e = 0; e < ends.size(); ++e)
    if (row < ends[e]) return static_cast<int32_t>(e);
  return -1;
}

int64_t GroupedRows::x_row_of(int64_t row) const {
  if (x_index.empty()) return row;
  return x_index[row] >= 0 && x_index[row] < x_rows ? x_index[row] : -1;
}

GroupedShape random_grouped_shape(Rng &rng, int blocksize) {
  GroupedShape shape{static_cast<int32_t>(rng.between(1, 9)), rng.between(1, 40),
                     rng.between(1, 700), rng.between(1, 24)};
  if (rng.one_in(5)) shape.m = rng.between(60, 400);
  if (rng.one_in(8)) shape.experts = static_cast<int32_t>(rng.between(60, 140));
  if (shape.experts > 1) {
    // One of them has the factors of two that the product needs.
    if (rng.one_in(4))
      shape.n = std::max<int64_t>(1, shape.n / 16) * blocksize;
    else
      shape.k = (shape.k + blocksize - 1) / blocksize * blocksize;
  }
  while (shape.m > 1 && shape.m * shape.n * shape.k > kProducts) shape.m /= 2;
  while (shape.experts > 2 && shape.experts * shape.n * shape.k > 4 * kProducts) shape.experts /= 2;
  return shape;
}

GroupedRows random_grouped_rows(Rng &rng, const GroupedShape &shape, Routing routing) {
  GroupedRows rows{};
  rows.shape = shape;
  const bool indexed = rng.one_in(2);
  rows.x_rows = shape.m + (rng.one_in(2) ? 0 : rng.below(5));
  if (indexed) rows.x_rows = rng.one_in(10) ? 0 : rng.between(1, std::max<int64_t>(1, shape.m));
  rows.ends = random_ends(rng, shape, routing);
  if (indexed) rows.x_index = random_index(rng, shape.m, rows.x_rows);
  if (rng.one_in(2))
    for (int64_t i = 0; i < shape.m; ++i) rows.row_scale.push_back(rng.normal());
  return rows;
}

GroupedCase random_grouped_case(Rng &rng, const CaseClass &kind, const GroupedShape &shape,
                                Routing routing, bool plain) {
  constexpr XKind kKinds[] = {XKind::kOrdinary, XKind::kOutliers, XKind::kNotFinite};
  GroupedCase test{};
  static_cast<GroupedRows &>(test) = random_grouped_rows(rng, shape, routing);
  const MatmulShape of_all{shape.experts * shape.n, shape.k, test.x_rows};
  test.all =
      plain ? plain_matmul_case(rng, kind, of_all)
            : random_matmul_case(rng, kind, random_codebook_kind(rng), of_all, rng.pick(kKinds));
  test.y_stride = row_stride(rng, shape.n);
  test.bias_stride = shape.n + (rng.one_in(2) ? 0 : rng.below(9));
  const int item = dtype_bytes(kind.dtype);
  if (!test.all.bias.empty() && shape.experts * shape.n != 0) {
    test.bias.assign(((shape.experts - 1) * test.bias_stride + shape.n) * item, 0xff);
    for (int64_t e = 0; e < shape.experts; ++e)
      std::memcpy(&test.bias[e * test.bias_stride * item], &test.all.bias[e * shape.n * item],
                  shape.n * item);
  }
  return test;
}

std::vector<uint8_t> random_own_codebook(Rng &rng, float first) {
  float entries[16] = {first};
  for (int i = 1; i < 16; ++i) entries[i] = 2 * rng.uniform() - 1;
  std::vector<uint8_t> bytes(sizeof entries);
  std::memcpy(bytes.data(), entries, sizeof entries);
  return bytes;
}

Expected expect(const GroupedCase &test, const nf4_tensor &weight, int64_t row, int64_t n) {
  const int64_t of_all = test.expert_of(row) * test.shape.n + n, x_row = test.x_row_of(row);
  Expected y;
  if (x_row >= 0) {
    y = expect(test.all, weight, x_row, of_all);
  } else if (!test.bias.empty()) {
    y.value = read_number(test.all.dtype, test.all.bias.data(), of_all);
    y.magnitude = std::fabs(y.value);
  }
  if (test.row_scale.empty()) return y;
  const double scale = test.row_scale[row];
  y.largest = std::max(y.largest, y.magnitude);  // a sum may be infinite before it is scaled
  y.value *= scale;
  y.magnitude *= std::fabs(scale);
  y.energy *= scale * scale;
  y.small = y.small * std::fabs(scale) + 1;
  y.coarse *= std::fabs(scale);
  return y;
}

nf4_grouped_args grouped_args(const GroupedCase &test, const GroupedAddresses &at) {
  nf4_grouped_args args{};
  args.struct_size = sizeof args;
  args.dtype = test.all.dtype;
  args.experts = test.shape.experts;
  args.m = test.shape.m;
  args.x = at.x;
  args.x_stride = test.all.x_stride;
  args.x_rows = test.all.m;
  args.y = at.y;
  args.y_stride = test.y_stride;
  args.ends = static_cast<const int32_t *>(at.ends);
  args.x_index = test.x_index.empty() ? nullptr : static_cast<const int32_t *>(at.x_index);
  args.bias = test.bias.empty() ? nullptr : at.bias;
  args.bias_stride = test.bias_stride;
  args.row_scale = test.row_scale.empty() ? nullptr : static_cast<const float *>(at.row_scale);
  return args;
}

std::string describe(const GroupedRows &rows) {
  std::string text = std::to_string(rows.shape.experts) + " experts, " +
                     std::to_string(rows.shape.m) + " rows of y" +
                     (rows.x_index.empty() ? "" : ", index") +
                     (rows.row_scale.empty() ? "" : ", row scale") + ", ends";
  for (const int32_t end : rows.ends) text += " " + std::to_string(end);
  return text;
}

std::string describe(const GroupedCase &test, uint64_t stream) {
  return describe(test.all, stream) + ", " + describe(static_cast<const GroupedRows &>(test));
}

}  // namespace nf4::test
