// Several matmuls in one call on the CPU: bit-equal to as many calls.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/matmul/skinny/partition.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/force.hpp"
#include "support/matmul_cases.hpp"
#include "support/placed.hpp"
#include "support/variants.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

constexpr int kBatches = 150;
constexpr int kThreadCounts[] = {1, 2, 3, 7, 300, 0};

// Products on guarded memory, with a y for one call each and one for the call of all.
class Batch {
 public:
  Batch(Rng &rng, const std::vector<MatmulCase> &cases) {
    for (const MatmulCase &test : cases) {
      const int item = dtype_bytes(test.dtype);
      weights_.emplace_back(rng, test.weight);
      x_.push_back(random_buffer(rng, test.x.size(), item));
      bias_.push_back(random_buffer(rng, test.bias.size(), item));
      alone_.push_back(random_buffer(rng, test.y_bytes(), item));
      together_.push_back(random_buffer(rng, test.y_bytes(), item));
      std::copy(test.x.begin(), test.x.end(), x_.back().data());
      std::copy(test.bias.begin(), test.bias.end(), bias_.back().data());
      args_.push_back(test.args(x_.back().data(), bias_.back().data(), alone_.back().data()));
    }
  }

  void multiply_alone() {
    for (size_t i = 0; i < args_.size(); ++i)
      REQUIRE(nf4_matmul_cpu(&weights_[i].tensor(), &args_[i], 1) == NF4_STATUS_OK);
  }
  void multiply_together(int threads) {
    std::vector<const nf4_tensor *> tensors;
    std::vector<nf4_matmul_args> args = args_;
    for (size_t i = 0; i < args.size(); ++i) {
      tensors.push_back(&weights_[i].tensor());
      together_[i].poison();
      args[i].y = together_[i].data();
    }
    REQUIRE(nf4_matmul_batch_cpu(tensors.data(), args.data(), args.size(), threads) ==
            NF4_STATUS_OK);
  }
  // The memory between the rows of y, which is poison in both, is included.
  bool same() const {
    for (size_t i = 0; i < args_.size(); ++i)
      if (!std::equal(alone_[i].data(), alone_[i].data() + alone_[i].size(), together_[i].data()) ||
          !together_[i].surroundings_intact())
        return false;
    return true;
  }

 private:
  std::vector<PlacedWeight> weights_;
  std::vector<GuardedBuffer> x_, bias_, alone_, together_;
  std::vector<nf4_matmul_args> args_;
};

std::vector<MatmulCase> random_cases(Rng &rng) {
  constexpr XKind kKinds[] = {XKind::kOrdinary, XKind::kOutliers, XKind::kNotFinite};
  std::vector<MatmulCase> cases;
  const int count = static_cast<int>(rng.between(1, 6));
  for (int i = 0; i < count; ++i) {
    MatmulShape shape = random_matmul_shape(rng);
    if (rng.one_in(8)) shape.m = 0;
    if (rng.one_in(8)) shape.rows = 0;
    if (rng.one_in(8)) shape.cols = 0;
    const CaseClass kind{rng.pick(kDtypes), rng.pick(kBlocksizes), rng.one_in(2)};
    cases.push_back(
        random_matmul_case(rng, kind, random_codebook_kind(rng), shape, rng.pick(kKinds)));
  }
  return cases;
}

// Multiplies nothing, but says what it is asked for.
std::mutex asked_mutex;
std::vector<std::pair<int64_t, cpu::RowRange>> asked;  // m, rows

void record(const MatmulProblem &problem, const RoundedCodebook &, cpu::RowRange rows) {
  const std::lock_guard<std::mutex> lock(asked_mutex);
  asked.emplace_back(problem.m, rows);
}

// One call gives the bits of one call each, on any number of threads.
void check_thread_counts(Batch &batch) {
  batch.multiply_alone();
  for (const int threads : kThreadCounts) {
    INFO("threads " << threads);
    batch.multiply_together(threads);
    CHECK(batch.same());
  }
}

}  // namespace

TEST_CASE("products in one call have the bits of one call each", "[matmul]") {
  for (int i = 0; i < cases_of(kBatches); ++i) {
    Rng rng(0xf000000 + i);
    const std::vector<MatmulCase> cases = random_cases(rng);
    for (const cpu::Variant *variant : supported_variants()) {
      const int threads = rng.pick(kThreadCounts);
      INFO("variant " << variant->name << ", stream " << i << ", " << cases.size()
                      << " products, threads " << threads);
      const ForcedVariant forced(*variant);
      Batch batch(rng, cases);
      batch.multiply_alone();
      batch.multiply_together(threads);
      REQUIRE(batch.same());
    }
  }
}

TEST_CASE("as many products as a call takes have the bits of one call each", "[matmul]") {
  Rng rng(0xfb00000);
  std::vector<MatmulCase> cases;
  while (cases.size() < NF4_MATMUL_BATCH_MAX)
    for (const MatmulCase &test : random_cases(rng))
      if (cases.size() < NF4_MATMUL_BATCH_MAX) cases.push_back(test);
  Batch batch(rng, cases);
  check_thread_counts(batch);
}

TEST_CASE("threads share the rows of a large product beside a small one", "[matmul]") {
  constexpr int64_t kLargeRows = 64, kLargeM = 4096, kSmallRows = 1 << 19, kSmallM = 1;
  cpu::Variant recording = scalar_variant();
  recording.matmul = record;
  const ForcedVariant forced(recording);
  for (const bool large_first : {false, true}) {
    MatmulProblem problems[2]{};
    problems[0].m = kSmallM;
    problems[0].weight.rows = kSmallRows;
    problems[1].m = kLargeM;
    problems[1].weight.rows = kLargeRows;
    for (MatmulProblem &problem : problems) problem.weight.cols = 64;
    if (large_first) std::swap(problems[0], problems[1]);
    for (const int threads : {1, 2, 3, 300}) {
      INFO("threads " << threads << ", the large one " << (large_first ? "first" : "last"));
      asked.clear();
      cpu::matmul(problems, 2, threads);
      std::vector<int> large(kLargeRows), small(kSmallRows);
      int64_t most = 0;
      for (const auto &[m, rows] : asked) {
        if (m == kLargeM) most = std::max(most, rows.end - rows.begin);
        for (int64_t row = rows.begin; row < rows.end; ++row) ++(m == kLargeM ? large : small)[row];
      }
      CHECK(std::count(large.begin(), large.end(), 1) == kLargeRows);
      CHECK(std::count(small.begin(), small.end(), 1) == kSmallRows);
      CHECK(most <= (threads == 1 ? kLargeRows : kLargeRows / 4));
    }
  }
}

TEST_CASE("the number of threads changes no bit of products in one call", "[matmul]") {
  Rng rng(0xf800000);
  std::vector<MatmulCase> cases;
  for (const MatmulShape shape : {MatmulShape{1503, 2080, 1}, MatmulShape{37, 64, 2},
                                  MatmulShape{0, 64, 1}, MatmulShape{703, 1500, 5}})
    cases.push_back(random_matmul_case(rng, {NF4_DTYPE_BF16, 64, true}, CodebookKind::kNf4, shape,
                                       XKind::kOutliers));
  Batch batch(rng, cases);
  check_thread_counts(batch);
}

TEST_CASE("thread blocks are dealt so that the largest share is least", "[matmul]") {
  using cuda::WeightSize;
  constexpr int64_t kBlocks[] = {5, 8, 16, 108, 132};
  constexpr int64_t kCols[] = {64, 256, 4096, 14336};
  Rng rng(0xfa00000);
  for (int i = 0; i < 2000; ++i) {
    const int64_t blocks = rng.pick(kBlocks);
    const int count = static_cast<int>(rng.between(2, 4));
    WeightSize weights[4];
    int64_t dealt[4], slowly[4] = {1, 1, 1, 1};
    for (int w = 0; w < count; ++w)
      weights[w] = {rng.between(1, rng.one_in(3) ? 20 : 20000), rng.pick(kCols)};
    cuda::partition_ctas(weights, count, blocks, dealt);

    const auto most = [&](const int64_t *of) {
      return std::max_element(weights, weights + count,
                              [&](const auto &a, const auto &b) {
                                return ceil_divide(a.rows, of[&a - weights]) * a.cols <
                                       ceil_divide(b.rows, of[&b - weights]) * b.cols;
                              }) -
             weights;
    };
    const auto largest_share = [&](const int64_t *of) {
      const auto w = most(of);
      return ceil_divide(weights[w].rows, of[w]) * weights[w].cols;
    };
    // One at a time to whoever has most, until that one cannot be divided any further.
    for (int64_t left = blocks - count; left > 0; --left) {
      const auto w = most(slowly);
      if (slowly[w] == weights[w].rows) break;
      ++slowly[w];
    }
    CHECK(largest_share(dealt) == largest_share(slowly));
    int64_t sum = 0, rows = 0;
    for (int w = 0; w < count; ++w) {
      CHECK((dealt[w] >= 1 && dealt[w] <= weights[w].rows));
      sum += dealt[w];
      rows += weights[w].rows;
    }
    CHECK(sum == std::min(blocks, rows));
  }
}

TEST_CASE("columns of one matrix are written side by side", "[matmul]") {
  constexpr int64_t kRowsOf[] = {40, 17, 23}, kCols = 96, kM = 5, kAll = 40 + 17 + 23;
  Rng rng(0xf900000);
  std::vector<PlacedWeight> weights;
  std::vector<MatmulCase> cases;
  for (const int64_t rows : kRowsOf)
    cases.push_back(random_matmul_case(rng, {NF4_DTYPE_FP32, 64, false}, CodebookKind::kNf4,
                                       {rows, kCols, kM}, XKind::kOrdinary));
  std::vector<float> x(kM * kCols), y(kM * kAll), alone;
  for (float &value : x) value = rng.normal();
  const nf4_tensor *tensors[3];
  nf4_matmul_args args[3];
  weights.reserve(3);
  int64_t column = 0;
  for (int i = 0; i < 3; ++i) {
    weights.emplace_back(rng, cases[i].weight);
    tensors[i] = &weights[i].tensor();
    args[i] = {sizeof(nf4_matmul_args), NF4_DTYPE_FP32, 0,      kM, x.data(), kCols, nullptr,
               y.data() + column,       kAll,           nullptr};
    column += kRowsOf[i];
  }
  REQUIRE(nf4_matmul_batch_cpu(tensors, args, 3, 2) == NF4_STATUS_OK);
  alone.resize(y.size());
  column = 0;
  for (int i = 0; i < 3; ++i) {
    args[i].y = alone.data() + column;
    REQUIRE(nf4_matmul_cpu(tensors[i], &args[i], 1) == NF4_STATUS_OK);
    column += kRowsOf[i];
  }
  CHECK(std::memcmp(y.data(), alone.data(), y.size() * sizeof(float)) == 0);
}

TEST_CASE("more codebooks than are kept change no bit of each other's products", "[matmul]") {
  constexpr int kCodebooks = 20;
  Rng rng(0xf900000);
  std::vector<MatmulCase> cases;
  for (int i = 0; i < kCodebooks; ++i)
    cases.push_back(random_matmul_case(rng, {NF4_DTYPE_BF16, 64, false}, CodebookKind::kSorted,
                                       {50, 512, 1}, XKind::kOrdinary));
  for (const cpu::Variant *variant : supported_variants()) {
    INFO("variant " << variant->name);
    const ForcedVariant forced(*variant);
    std::vector<Batch> alone;
    for (const MatmulCase &test : cases) alone.emplace_back(rng, std::vector<MatmulCase>{test});
    for (Batch &batch : alone) batch.multiply_alone();
    // The last are met again before they are replaced, the first after.
    for (auto batch = alone.rbegin(); batch != alone.rend(); ++batch) {
      batch->multiply_together(2);
      REQUIRE(batch->same());
    }
  }
}
