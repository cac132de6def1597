#include "support/lora_grad_case.hpp"

#include <algorithm>
#include <cmath>

#include "support/catch.hpp"

namespace nf4::test {
namespace {

constexpr double kUnit[] = {0x1p-24, 0x1p-11, 0x1p-8};  // indexed by dtype
// Rounding to fp16 may be off by half a subnormal; the subnormals of fp32 and bf16 are below 1e-30.
constexpr double kLeastError[] = {1e-30, 0x1p-25, 1e-30};

}  // namespace

LoraGradShape random_lora_grad_shape(Rng &rng) {
  constexpr int kRanks[] = {1, 7, 8, 16, 32, 33, 64, 128};
  constexpr int64_t kMostProducts = 3'000'000;
  LoraGradShape shape{rng.between(1, 40), rng.between(1, 700), rng.between(1, 700),
                      rng.one_in(4) ? static_cast<int>(rng.between(1, 128)) : rng.pick(kRanks)};
  if (rng.one_in(2)) {
    shape.rows = rng.between(1, 20) * 16;
    shape.cols = rng.between(1, 20) * 16;
  }
  const int64_t most = kMostProducts / (shape.rank * (shape.rows + shape.cols));
  if (rng.one_in(2)) shape.m = rng.between(1, std::clamp<int64_t>(most, 1, 500));
  if (rng.one_in(4)) shape.m = std::max<int64_t>(1, std::min<int64_t>(most, 512) / 16) * 16;
  return shape;
}

nf4_dtype random_grad_dtype(Rng &rng, nf4_dtype dtype) {
  return rng.one_in(2) ? NF4_DTYPE_FP32 : dtype;
}

LoraGradCase::LoraGradCase(Rng &rng, nf4_dtype dtype, nf4_dtype grad_dtype,
                           const LoraGradShape &shape)
    : x(rng, dtype, shape.m, shape.cols),
      dy(rng, dtype, shape.m, shape.rows),
      p(rng, dtype, shape.m, shape.rank, true),
      q(rng, dtype, shape.m, shape.rank, true),
      da(rng, grad_dtype, shape.rank, shape.cols),
      db(rng, grad_dtype, shape.rows, shape.rank),
      scale(rng.one_in(4) ? -2.0f : rng.uniform()) {
  for (Matrix *matrix : {&x, &dy, &p, &q}) matrix->fill(rng);
}

nf4_lora_grad_args LoraGradCase::args() const {
  return {sizeof(nf4_lora_grad_args),
          x.dtype,
          da.dtype,
          static_cast<int32_t>(da.rows),
          scale,
          x.rows,
          dy.cols,
          x.cols,
          x.buffer.data(),
          x.stride,
          dy.buffer.data(),
          dy.stride,
          p.buffer.data(),
          q.buffer.data(),
          da.buffer.data(),
          da.stride,
          db.buffer.data(),
          db.stride};
}

void LoraGradCase::poison_outputs() {
  da.buffer.poison();
  db.buffer.poison();
}

bool LoraGradCase::surroundings_intact() const {
  for (const Matrix *matrix : {&x, &dy, &p, &q, &da, &db})
    if (!matrix->buffer.surroundings_intact()) return false;
  return da.gaps_untouched() && db.gaps_untouched();
}

std::string describe(const LoraGradCase &test, uint64_t stream) {
  return "dtype " + std::to_string(test.x.dtype) + ", grad_dtype " + std::to_string(test.da.dtype) +
         ", " + std::to_string(test.dy.cols) + "x" + std::to_string(test.x.cols) + ", m " +
         std::to_string(test.x.rows) + ", rank " + std::to_string(test.da.rows) + ", strides " +
         std::to_string(test.x.stride) + " " + std::to_string(test.dy.stride) + " " +
         std::to_string(test.da.stride) + " " + std::to_string(test.db.stride) + ", stream " +
         std::to_string(stream);
}

std::vector<ExpectedLoraGrad::Sum> ExpectedLoraGrad::sums(const Matrix &left, const Matrix &right,
                                                          float scale) {
  std::vector<Sum> sums(left.cols * right.cols);
  for (int64_t i = 0; i < left.rows; ++i)
    for (int64_t r = 0; r < left.cols; ++r) {
      const double factor = scale * left(i, r);
      Sum *const of_rank = &sums[r * right.cols];
      for (int64_t column = 0; column < right.cols; ++column) {
        const double term = factor * right(i, column);
        of_rank[column].value += term;
        of_rank[column].magnitude += std::fabs(term);
      }
    }
  return sums;
}

ExpectedLoraGrad::ExpectedLoraGrad(const LoraGradCase &test)
    : da_(sums(test.q, test.x, test.scale)), db_(sums(test.p, test.dy, test.scale)) {}

void ExpectedLoraGrad::check(const LoraGradCase &test, const Matrix &got, const Sum &sum,
                             int64_t row, int64_t column) {
  const double of_terms = 0x1p-24 * (64 + static_cast<double>(test.x.rows) / 8);
  const double error = kUnit[got.dtype - 1] * std::fabs(sum.value) + of_terms * sum.magnitude +
                       kLeastError[got.dtype - 1];
  if (!(std::fabs(got(row, column) - sum.value) <= error)) {  // CHECK is slow
    INFO((&got == &test.da ? "da[" : "db[") << row << "][" << column << "] is " << got(row, column)
                                            << ", expected " << sum.value << " within " << error);
    FAIL();
  }
}

void ExpectedLoraGrad::check_da(const LoraGradCase &test) const {
  for (int64_t r = 0; r < test.da.rows; ++r)
    for (int64_t column = 0; column < test.da.cols; ++column)
      check(test, test.da, da_[r * test.da.cols + column], r, column);
}

void ExpectedLoraGrad::check_db(const LoraGradCase &test) const {
  for (int64_t row = 0; row < test.db.rows; ++row)
    for (int64_t r = 0; r < test.db.cols; ++r)
      check(test, test.db, db_[r * test.db.rows + row], row, r);
}

}  // namespace nf4::test
