// Adapters (LoRA) beside a product: every CUDA matmul kernel that this GPU runs, against the sums
// in binary64.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "cuda/lora/lora.hpp"
#include "cuda/lora/tma.hpp"
#include "cuda/lora/workspace.hpp"
#include "cuda/matmul/matmul.hpp"
#include "cuda/matmul/workspace.hpp"
#include "support/adapter.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/families.hpp"
#include "support/force_matmul.hpp"
#include "support/matmul_cases.hpp"
#include "support/matmul_expected.hpp"
#include "support/matmul_placed.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

nf4_tensor in_place(HostWeight &weight) {
  std::array<void *, kPartCount> addresses{};
  for (int part = 0; part < kPartCount; ++part)
    if (weight.has(Part(part))) addresses[part] = weight.bytes[part].data();
  return weight.at(addresses);
}

// An element of what x is multiplied by, A or in the gradient B, and of what that product is.
double in_element(const MatmulCase &test, const HostAdapter &adapter, int r, int64_t k) {
  return test.gradient ? read_number(adapter.dtype, adapter.b.data(), k * adapter.b_stride + r)
                       : read_number(adapter.dtype, adapter.a.data(), r * adapter.a_stride + k);
}
double out_element(const MatmulCase &test, const HostAdapter &adapter, int r, int64_t column) {
  return test.gradient
             ? read_number(adapter.dtype, adapter.a.data(), r * adapter.a_stride + column)
             : read_number(adapter.dtype, adapter.b.data(), column * adapter.b_stride + r);
}

// x A^T, or dY B, in binary64: [m][rank].
std::vector<double> exact_product(const MatmulCase &test, const HostAdapter &adapter) {
  std::vector<double> product;
  for (int64_t i = 0; i < test.m; ++i)
    for (int r = 0; r < adapter.rank; ++r) {
      double sum = 0;
      for (int64_t k = 0; k < test.x_columns(); ++k)
        sum += read_number(test.dtype, test.x.data(), i * test.x_stride + k) *
               in_element(test, adapter, r, k);
      product.push_back(sum);
    }
  return product;
}

// Errors by norm: of 16 bits, those of rounding what is multiplied and the output.
double most_error(nf4_dtype dtype) {
  return dtype == NF4_DTYPE_FP32 ? 2e-6 : dtype == NF4_DTYPE_BF16 ? 4e-3 : 5e-4;
}

struct ExpectedLora {
  std::vector<double> product, y;

  ExpectedLora(MatmulCase &test, const HostAdapter &adapter)
      : product(exact_product(test, adapter)) {
    const ExpectedProduct base(test, in_place(test.weight));
    const int64_t columns = test.y_columns();
    for (int64_t i = 0; i < test.m; ++i)
      for (int64_t column = 0; column < columns; ++column) {
        double sum = 0;
        for (int r = 0; r < adapter.rank; ++r)
          sum += product[i * adapter.rank + r] * out_element(test, adapter, r, column);
        y.push_back(base[i * columns + column].value + adapter.scale * sum);
      }
  }

  // Errors by rows of x and by columns of y, so that a wrong one is not lost among the others.
  void check(const MatmulCase &test, const std::vector<uint8_t> &got) const {
    const int64_t rows = test.y_columns();
    std::vector<RelativeError> of_m(test.m), of_row(rows);
    RelativeError all;
    for (int64_t i = 0; i < test.m * rows; ++i) {
      const double each = read_number(test.dtype, got.data(), i / rows * test.y_stride + i % rows);
      of_m[i / rows].add(each, y[i]);
      of_row[i % rows].add(each, y[i]);
      all.add(each, y[i]);
    }
    const auto bound = [&](const std::vector<RelativeError> &errors) {
      double most = 0;
      for (const RelativeError &error : errors)
        most = std::max(most,
                        std::sqrt(error.error / (all.norm / static_cast<double>(errors.size()))));
      return most;
    };
    CHECK(all.value() <= most_error(test.dtype));
    CHECK(bound(of_m) <= 10 * most_error(test.dtype));
    CHECK(bound(of_row) <= 10 * most_error(test.dtype));
  }
  void check_product(const MatmulCase &test, const std::vector<uint8_t> &got) const {
    RelativeError error;
    for (size_t i = 0; i < product.size(); ++i)
      error.add(read_number(test.dtype, got.data(), static_cast<int64_t>(i)), product[i]);
    CHECK(error.value() <= most_error(test.dtype));
  }
};

// Every kernel of these that takes the case, aligned and as it comes.
void check_lora(MatmulCase &test, const HostAdapter &adapter, Rng &rng, const Stream &stream,
                MatmulCounts &counts, ConfigRange configs = {}) {
  const ExpectedLora expected(test, adapter);
  for (const bool aligned : {false, true}) {
    const PlacedMatmul placed(rng, test, aligned);
    const PlacedAdapter with(rng, test, adapter, placed, aligned, rng.one_in(2) || !aligned);
    for (const cuda::GpuFamily *family : runnable_families())
      for (int config = configs.first; config < configs.end; ++config) {
        INFO("family " << family->name << ", " << cuda::kMatmulConfigs[config].name
                       << (aligned ? ", aligned" : ""));
        const ForcedMatmul forced(family, config);
        if (with.used(placed) != config) continue;
        ++counts[family][config];
        fill_bytes(placed.y.data(), 0xa5, placed.y.size());
        fill_bytes(with.product.data(), 0xa5, with.product.size());
        fill_bytes(with.workspace.data(), 0xff, with.workspace.size());
        REQUIRE(with.multiply(placed, stream) == NF4_STATUS_OK);
        stream.synchronize();
        const std::vector<uint8_t> y = placed.y.read();
        expected.check(test, y);
        if (with.lora.product != nullptr) expected.check_product(test, with.product.read());
        if (with.lora.product == nullptr) CHECK(with.product.untouched());
        CHECK(placed.y.lead_intact());
        CHECK(with.workspace.lead_intact());
        if (few_shapes()) continue;  // a sanitizer sees no more in a second launch
        REQUIRE(with.multiply(placed, stream) == NF4_STATUS_OK);
        stream.synchronize();
        CHECK(same_bytes(placed.y.read(), y));
      }
  }
}

// Each kernel that this GPU has was met, but for the wgmma kernels of stream-K and the skinny ones,
// which take few of the shapes.
void check_counts(MatmulCounts &counts, bool gradient) {
  const auto has = gradient ? cuda::matmul_grad_has : cuda::matmul_has;
  for (const cuda::GpuFamily *family : runnable_families())
    for (int config = cuda::kMma64x64; config < cuda::kMatmulConfigCount; ++config) {
      if (cuda::is_skinny(config) || (cuda::is_wgmma(config) && cuda::is_stream_k(config)))
        continue;
      INFO("family " << family->name << ", " << cuda::kMatmulConfigs[config].name);
      if (has(*family, config, compute_capability())) CHECK(counts[family][config] > 0);
    }
}

// The product of x with an adapter's factor where all is aligned, and where it runs.
struct AlignedLora {
  const PlacedMatmul placed;
  const PlacedAdapter with;
  const MatmulProblem problem;
  const cuda::LoraProblem lora;
  cuda::LaunchTarget target{};

  AlignedLora(Rng &rng, const MatmulCase &test, const HostAdapter &adapter)
      : placed(rng, test, true),
        with(rng, test, adapter, placed, true, true),
        problem(with.problem(placed)),
        lora(test.gradient ? cuda::LoraProblem(cuda::transposed(problem))
                           : cuda::LoraProblem(problem)) {
    REQUIRE(cuda::cached_device(0, target.device) == NF4_STATUS_OK);
    target.family = runnable_families()[0];
  }
};

// Of x A^T beside a wgmma kernel.
int persistent_ctas(Rng &rng, const MatmulCase &test, const HostAdapter &adapter) {
  const AlignedLora aligned(rng, test, adapter);
  return cuda::plan_lora(aligned.target.device, aligned.lora).persistent_ctas;
}

bool has_wide_kernel(Rng &rng, const MatmulCase &test, const HostAdapter &adapter) {
  const AlignedLora aligned(rng, test, adapter);
  return cuda::can_run_wide_lora(aligned.target, aligned.lora);
}

// After a product all flags of a workspace are as they were, or 0, and some are 0. False if the
// kernel does not make x A^T itself.
bool check_flags(Rng &rng, const MatmulCase &test, const HostAdapter &adapter, const Stream &stream,
                 const std::pair<const cuda::GpuFamily *, int> &kernel) {
  const AlignedLora aligned(rng, test, adapter);
  if (!cuda::has_lora_ctas(aligned.lora)) return false;
  const ForcedMatmul forced(kernel.first, kernel.second);
  fill_bytes(aligned.with.workspace.data(), 0xff, aligned.with.workspace.size());
  REQUIRE(aligned.with.multiply(aligned.placed, stream) == NF4_STATUS_OK);
  stream.synchronize();
  const std::vector<uint8_t> bytes = aligned.with.workspace.read();
  std::vector<uint64_t> flags(cuda::lora_flags(aligned.problem.lora, test.weight.shape.rows));
  std::memcpy(flags.data(), bytes.data() + cuda::MatmulWorkspace(aligned.problem).bytes(),
              flags.size() * 8);
  CHECK(std::count(flags.begin(), flags.end(), 0) > 0);
  CHECK(std::count(flags.begin(), flags.end(), 0) +
            std::count(flags.begin(), flags.end(), ~uint64_t{0}) ==
        static_cast<int64_t>(flags.size()));
  return true;
}

// Of the best family, which alone has stream-K kernels.
bool has_kernel(int config, bool gradient) {
  const auto has = gradient ? cuda::matmul_grad_has : cuda::matmul_has;
  return has(*runnable_families()[0], config, compute_capability());
}

// Of x, of what it is multiplied by, and of the adapter.
struct SizeBesideWgmma {
  int64_t rows, cols, m;
  int rank;
};

// A sanitizer needs one dtype of 16 bits, as the kernels of both have the same accesses: the one
// that every GPU has.
bool left_out(nf4_dtype dtype) { return few_shapes() && dtype == NF4_DTYPE_BF16; }

// A wgmma kernel with an adapter, whose x A^T another kernel makes, by dtypes, factors' dtypes and
// sizes, of a product and of a gradient: check_kernel(rng, test, adapter) checks which one makes
// it. Random numbers are those of the seeds after `number`.
template <size_t Count, class CheckKernel>
void check_beside_wgmma(uint64_t number, const SizeBesideWgmma (&sizes)[Count],
                        CheckKernel check_kernel) {
  const Stream stream;
  for (const bool gradient : {false, true})
    for (const nf4_dtype dtype : {NF4_DTYPE_FP16, NF4_DTYPE_BF16})
      for (const nf4_dtype factors : {dtype, NF4_DTYPE_FP32})
        for (const auto &[rows, cols, m, rank] : sizes) {
          if (left_out(dtype) || (m > 10000 && dtype != NF4_DTYPE_BF16)) continue;
          if (m > 2000 && few_shapes()) continue;
          Rng rng(++number);
          const MatmulShape shape = gradient ? MatmulShape{cols, rows / 64 * 64, m, true}
                                             : MatmulShape{rows, cols / 64 * 64, m};
          MatmulCase test = plain_matmul_case(rng, {dtype, 64, rng.one_in(2)}, shape);
          repeat_rows(test, rng, 8);
          const HostAdapter adapter =
              random_adapter(rng, test, factors, gradient ? rank : rank - 3, false);
          INFO(describe(test, number) << ", rank " << adapter.rank << " of dtype " << factors);
          MatmulCounts counts;
          const int config = cuda::config_named(m > 200 ? "wgmma_256x128" : "wgmma_64x128");
          check_lora(test, adapter, rng, stream, counts, {config, config + 1});
          if (!has_kernel(config, gradient)) continue;
          CHECK(counts[runnable_families()[0]][config] > 0);
          check_kernel(rng, test, adapter);
        }
}

}  // namespace

TEST_CASE("every kernel adds an adapter", "[cuda][matmul][lora]") {
  const Stream stream;
  MatmulCounts counts;
  constexpr MatmulShape kShapes[] = {{130, 1536, 2}, {140, 3072, 9},  {75, 500, 5}, {130, 1536, 17},
                                     {300, 512, 70}, {264, 512, 310}, {20, 333, 40}};
  constexpr int kRanks[] = {1, 8, 16, 40, 64, 128};
  uint64_t number = 0xb900000;
  for (const nf4_dtype dtype : {NF4_DTYPE_FP32, NF4_DTYPE_FP16, NF4_DTYPE_BF16})
    for (const MatmulShape &shape : kShapes)
      for (int i = 0; i < (few_shapes() ? 1 : 3); ++i) {
        if (left_out(dtype) || (dtype == NF4_DTYPE_FP32 && shape.m > kFp32RowsOfX)) continue;
        Rng rng(++number);
        MatmulCase test = plain_matmul_case(rng, {dtype, 64, rng.one_in(2)}, shape);
        const nf4_dtype factors = rng.one_in(2) ? NF4_DTYPE_FP32 : dtype;
        const HostAdapter adapter =
            random_adapter(rng, test, factors, rng.pick(kRanks), rng.one_in(3));
        INFO(describe(test, number) << ", rank " << adapter.rank << " of dtype " << factors);
        check_lora(test, adapter, rng, stream, counts);
      }
  check_counts(counts, false);
}

TEST_CASE("every kernel of the gradient adds an adapter", "[cuda][matmul][lora]") {
  const Stream stream;
  MatmulCounts counts;
  // The second is such as a skinny kernel takes without an adapter.
  constexpr MatmulShape kShapes[] = {{1536, 128, 2, true},
                                     {1024, 256, 9, true},
                                     {512, 264, 70, true},
                                     {512, 320, 310, true},
                                     {333, 20, 40, true}};
  constexpr int kRanks[] = {1, 8, 16, 40, 64, 128};
  uint64_t number = 0xbc00000;
  for (const nf4_dtype dtype : {NF4_DTYPE_FP32, NF4_DTYPE_FP16, NF4_DTYPE_BF16})
    for (const MatmulShape &shape : kShapes)
      for (int i = 0; i < (few_shapes() ? 1 : 3); ++i) {
        if (left_out(dtype)) continue;
        Rng rng(++number);
        MatmulCase test = plain_matmul_case(rng, {dtype, 64, rng.one_in(2)}, shape);
        const nf4_dtype factors = rng.one_in(2) ? NF4_DTYPE_FP32 : dtype;
        const HostAdapter adapter =
            random_adapter(rng, test, factors, rng.pick(kRanks), rng.one_in(3));
        INFO(describe(test, number) << ", rank " << adapter.rank << " of dtype " << factors);
        check_lora(test, adapter, rng, stream, counts);
      }
  check_counts(counts, true);
}

// x A^T by persistent CTAs: several tiles of x each, tails of x, in the gradient of its columns
// too, fewer columns than warps take, ranks past the adapter's, and CTAs of the wgmma kernel that
// start late.
TEST_CASE("x A^T beside a wgmma kernel", "[cuda][matmul][lora]") {
  constexpr SizeBesideWgmma sizes[] = {
      {128, 1096, 250, 16}, {136, 1160, 530, 8}, {128, 200, 17, 16}, {264, 2120, 1100, 8}};
  check_beside_wgmma(0xbe00000, sizes, [](Rng &rng, const MatmulCase &test, const auto &adapter) {
    CHECK(persistent_ctas(rng, test, adapter) == (test.m > 1024 ? 8 : 4));
  });
}

// x A^T of more than 16 ranks: clusters of 8 CTAs to 1, chunks of ranks, tails of x, columns, ranks
// and in the gradient of the factor's rows.
TEST_CASE("x A^T of many ranks", "[cuda][matmul][lora]") {
  constexpr SizeBesideWgmma sizes[] = {{128, 4168, 70, 64},
                                       {136, 1160, 530, 128},
                                       {128, 200, 17, 24},
                                       {64, 1096, 2200, 40},
                                       {64, 264, 17000, 32}};
  check_beside_wgmma(0xbf00000, sizes, [](Rng &rng, const MatmulCase &test, const auto &adapter) {
    CHECK(has_wide_kernel(rng, test, adapter));
  });
}

// x A^T by the first CTAs of a skinny kernel: as many as share the columns, and two and four times
// as many, which share the ranks too. Each flag that was set has been cleared.
TEST_CASE("x A^T by the first CTAs of a skinny kernel", "[cuda][matmul][lora]") {
  const Stream stream;
  uint64_t number = 0xc000000;
  int checked = 0;
  for (const nf4_dtype dtype : {NF4_DTYPE_FP32, NF4_DTYPE_FP16, NF4_DTYPE_BF16})
    for (const nf4_dtype factors : {dtype, NF4_DTYPE_FP32})
      for (const int rank : {16, 63, 128})
        for (const int64_t m : {1, 5, 16}) {
          if (few_shapes() && (rank != 63 || m == 5)) continue;
          Rng rng(++number);
          const int64_t rows = m == 5 && rank == 16 ? 1 : 300;
          MatmulCase test = plain_matmul_case(rng, {dtype, 64, rng.one_in(2)}, {rows, 8192, m});
          const HostAdapter adapter = random_adapter(rng, test, factors, rank, rng.one_in(4));
          INFO(describe(test, number) << ", rank " << adapter.rank << " of dtype " << factors);
          MatmulCounts counts;
          const int config = cuda::config_named(m == 1   ? "skinny_2"
                                                : m == 5 ? "skinny_8"
                                                         : "skinny_16");
          check_lora(test, adapter, rng, stream, counts, {config, config + 1});
          for (const cuda::GpuFamily *family : runnable_families())
            if (fits_skinny(dtype) && family->tensor_cores) {
              CHECK(counts[family][config] > 0);
              checked += check_flags(rng, test, adapter, stream, {family, config});
            }
        }
  CHECK((checked > 0 || !runnable_families()[0]->tensor_cores));
}

// The CTA that has a tile's last K-tile adds the adapter.
TEST_CASE("stream-K kernels add an adapter once", "[cuda][matmul][lora]") {
  const Stream stream;
  uint64_t number = 0xba00000;
  const struct {
    const char *config;
    MatmulShape shape;
  } products[] = {{"wgmma_16x256_stream_k", {rows_to_split(), 2304, 13}},
                  {"wgmma_32x256_stream_k", {rows_to_split(), 2304, 30}},
                  {"wgmma_64x128_stream_k", {rows_to_split(), 2304, 60}},
                  {"wgmma_128x128_stream_k", {rows_to_share() - 5, 1024, 100}},
                  {"wgmma_152x128_stream_k", {rows_to_split(), 2304, 150}},
                  {"wgmma_128x128_stream_k", {1024, rows_to_share(), 100, true}}};
  for (const auto &[name, shape] : products)
    for (const int rank : {16, 128}) {
      Rng rng(++number);
      MatmulCase test = plain_matmul_case(rng, {NF4_DTYPE_BF16, 64, true}, shape);
      repeat_rows(test, rng, 4);
      const HostAdapter adapter = random_adapter(rng, test, NF4_DTYPE_BF16, rank, false);
      MatmulCounts counts;
      INFO(describe(test, number) << ", " << name);
      const int config = cuda::config_named(name);
      const ConfigRange own{config, config + 1};
      check_lora(test, adapter, rng, stream, counts, few_shapes() ? own : ConfigRange{});
      if (has_kernel(config, shape.gradient)) CHECK(counts[runnable_families()[0]][config] > 0);
    }
}
