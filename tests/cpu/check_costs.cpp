// Checks costs that a caller hands over: what of a text is refused, the times that its rows give,
// and the kernels that they choose.
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <initializer_list>
#include <nf4/products.hpp>
#include <random>
#include <string>
#include <string_view>

#include "cuda/costs/built_in.hpp"
#include "cuda/costs/costs.hpp"
#include "cuda/matmul/choose.hpp"
#include "nf4/nf4.h"
#include "support/catch.hpp"
#include "support/choice_checks.hpp"
#include "support/error_of.hpp"

using namespace nf4;
using namespace nf4::test;
using cuda::CostedProduct;

namespace {

const std::string kFirst = std::string("nf4-costs 1 ") + nf4_version_string() + "\n";
const std::string kGpu = "gpu 80 sm80 108 166912 13000 GPU of a test\n";
constexpr cuda::CostedGpu kA100{80, 108, 166912, 13000, "sm80", "GPU of a test"};

std::string text_of(const std::string &rows) { return kFirst + kGpu + rows + "end\n"; }
nf4_status set(const std::string &text) { return nf4_set_costs(text.data(), text.size()); }

// Removes the costs at the end of a test.
struct Costs {
  explicit Costs(const std::string &rows) { REQUIRE(set(text_of(rows)) == NF4_STATUS_OK); }
  ~Costs() { nf4_set_costs(nullptr, 0); }
};

cuda::StrategyTimes times(int64_t m, cuda::CostedGpu gpu = kA100) {
  return cuda::find_times(gpu, {CostedProduct::kCodebook, NF4_DTYPE_FP16, m, 4000, 1000});
}

constexpr int kSkinny = static_cast<int>(cuda::MatmulKernel::kSkinny),
              kMultistage = static_cast<int>(cuda::MatmulKernel::kMultistage);

}  // namespace

TEST_CASE("a text of costs that is not understood is refused", "[costs]") {
  const std::string row = "codebook fp16 skinny 8 1.5 0.25 0 0\n";
  REQUIRE(set(text_of(row)) == NF4_STATUS_OK);
  const std::string good = text_of(row);
  for (size_t size = 0; size < good.size(); ++size)
    CHECK(set(good.substr(0, size)) == NF4_STATUS_INVALID_ARGUMENT);
  for (const char *const bad : {
           "codebook fp16 skinny 0 1 1 1 1\n",
           "codebook fp32 skinny 8 1 1 1 1\n",
           "codebook fp16 skinny 8 1 1 1\n",
           "codebook fp16 skinny 8 1 1 1 1 \n",
           "codebook fp16 skinny 8 1 1 1 1 1\n",
           "codebook fp16 skinny 8 -1 1 1 1\n",
           "codebook fp16 skinny 8 1e3 1 1 1\n",
           "codebook fp16 skinny 8 1. 1 1 1\n",
           "codebook fp16 skinny 8 .5 1 1 1\n",
           "codebook fp16 skinny 8 1.2.3 1 1 1\n",
           "codebook fp16 skinny 8 nan 1 1 1\n",
           "codebook fp16 skinny 8 1,5 1 1 1\n",
           "codebook fp16 skinny 8 1111111111111111111 1 1 1\n",
           "experts fp16 skinny 8 1 1 1 1\n",
           "codebook fp16 skinny 1048577 1 1 1 1\n",
           "codebook fp16 skinny 8 1 1 1 1\r\n",
           "codebook  fp16 skinny 8 1 1 1 1\n",
           "\n",
           "gpu 80 sm80 108 166912 13000 \n",
           "gpu 80 sm80 108 166912\n",
           "gpu x sm80 108 166912 13000 A\n",
           "codebook fp16 skinny 8 1 1 1 1\ncodebook fp16 skinny 8 1 1 1 1\n",
           "codebook fp16 skinny 8 1 1 1 1\ncodebook fp16 mma 8 1 1 1 1\n",
       }) {
    INFO(bad);
    CHECK(set(text_of(bad)) == NF4_STATUS_INVALID_ARGUMENT);
    CHECK(std::string(nf4_last_error()).find(" in line ") != std::string::npos);
  }
  CHECK(set(good + "x") == NF4_STATUS_INVALID_ARGUMENT);
  CHECK(set(kFirst + row + "end\n") == NF4_STATUS_INVALID_ARGUMENT);  // no GPU
  CHECK(set("nf4-costs 1 9.9.9\nend\n") == NF4_STATUS_INVALID_ARGUMENT);
  CHECK(std::string(nf4_last_error()).find(kFirst.substr(0, kFirst.size() - 1)) !=
        std::string::npos);
  std::string gpus, rows;
  for (int i = 0; i < 9; ++i) gpus += kGpu;
  CHECK(set(kFirst + gpus + "end\n") == NF4_STATUS_INVALID_ARGUMENT);
  for (int i = 1; i <= 4097; ++i)
    rows += "codebook fp16 skinny " + std::to_string(i) + " 1 1 1 1\n";
  CHECK(set(text_of(rows)) == NF4_STATUS_INVALID_ARGUMENT);
  CHECK(times(7).us[kSkinny] == 2.5);  // the costs of the first text are still there
  CHECK(nf4_set_costs(nullptr, 0) == NF4_STATUS_OK);
  CHECK(!times(8).knows(kSkinny));
}

TEST_CASE("a program hands over the costs in a file", "[costs]") {
  const std::string path = "costs-" + std::to_string(getpid()) + ".txt";
  std::ofstream(path) << text_of("codebook fp16 skinny 1 3 0 0 0\n");
  set_costs_of(path);
  CHECK(times(1).us[kSkinny] == 3);
  std::ofstream(path) << "nf4-costs 1 9.9.9\n";
  CHECK_THROWS(set_costs_of(path));
  std::remove(path.c_str());
  CHECK_THROWS(set_costs_of(path));
  nf4_set_costs(nullptr, 0);
}

TEST_CASE("random bytes in a text of costs", "[costs]") {
  std::mt19937 random(50);
  const std::string good = text_of(
      "codebook fp16 skinny 8 1.5 0.25 0 0\ncodebook fp16 dense 8 9 0.000001 12.5 3\n"
      "awq bf16 dense 4096 99 1 1 1\n");
  for (int i = 0; i < 20000; ++i) {
    std::string text = good;
    for (unsigned changes = 1 + random() % 3; changes > 0; --changes)
      text[random() % text.size()] =
          random() % 4 == 0 ? static_cast<char>(random()) : good[random() % good.size()];
    const nf4_status status = set(text);
    REQUIRE((status == NF4_STATUS_OK || status == NF4_STATUS_INVALID_ARGUMENT));
    for (const double us : times(1 + random() % 5000).us) REQUIRE(us >= -1);
  }
  nf4_set_costs(nullptr, 0);
}

TEST_CASE("the rows of costs give times", "[costs]") {
  const Costs costs(
      "codebook fp16 skinny 1 1 1 1 1\n"
      "codebook fp16 skinny 8 2 1 1 1\n"
      "codebook fp16 multistage 16 10 0 0 0\n"
      "codebook fp16 multistage 64 40 0 0 0\n"
      "codebook fp16 multistage 128 60 0 0 0\n"
      "codebook fp16 dense 1 20 0 0 0\n"
      "codebook fp16 dense 101 30 0 0 0\n");
  // 4 million weights, 4 thousand rows, 1 thousand columns
  CHECK(times(1).us[kSkinny] == 10);
  CHECK(times(3).us[kSkinny] == 11);  // as skinny_8
  CHECK(times(16).us[kSkinny] == 22);
  CHECK(!times(8).knows(kMultistage));
  CHECK(times(9).us[kMultistage] == 10);
  CHECK(times(17).us[kMultistage] == 20);   // 32 rows
  CHECK(times(127).us[kMultistage] == 60);  // 128 rows
  CHECK(times(129).us[kMultistage] == 120);
  CHECK(times(51).us[cuda::kDenseStrategy] == 25);
  CHECK(times(202).us[cuda::kDenseStrategy] == 60);
  CHECK(!times(1).knows(0));
  for (cuda::CostedGpu other : {kA100, kA100, kA100, kA100, kA100}) {
    static int which = 0;
    if (which == 0) other.compute_capability = 86;
    if (which == 1) other.multiprocessors = 98;
    if (which == 2) other.shared_bytes = 101376;
    if (which == 3) other.driver_version = 12080;
    if (which == 4) other.name[0] = 'n';
    ++which;
    CHECK(!times(1, other).knows(kSkinny));
  }
}

TEST_CASE("built-in costs are understood", "[costs]") {
  static cuda::CostTable table;
  const std::string_view built_in = cuda::built_in_text();
  REQUIRE(cuda::parse_costs(built_in.data(), built_in.size(), table) == NF4_STATUS_OK);
  CHECK(cuda::have_built_in_costs() == (table.gpu_count > 0));
  CHECK(cuda::built_in_costs().row_count == table.row_count);
  for (int i = 0; i < table.gpu_count; ++i) CHECK(table.gpus[i].driver_version == 0);
}

TEST_CASE("known times choose among the strategies that can run", "[costs]") {
  const ChoiceGpu *a100 = nullptr, *h200 = kChoiceGpus;
  for (const ChoiceGpu &gpu : kChoiceGpus)
    if (gpu.compute_capability == 80) a100 = &gpu;
  MatmulProblem problem{};
  Weight &weight = problem.weight;
  weight.format = NF4_FORMAT_NF4;
  weight.rows = weight.cols = 4096;
  weight.elements = weight.rows * weight.cols;
  weight.blocksize_log2 = 6;
  weight.nested_blocksize_log2 = 8;
  weight.blocks = weight.elements >> 6;
  weight.nested_blocks = weight.blocks >> 8;
  problem.dtype = NF4_DTYPE_FP16;
  problem.x_stride = 4096;
  const auto chosen = [&](const ChoiceGpu &on, int64_t m, const cuda::StrategyTimes &known) {
    cuda::GpuFacts gpu = facts_of(on);
    problem.m = m;
    cuda::MatmulChoice choice{};
    const auto load = [&](cuda::GpuFacts &facts) {
      std::copy_n(on.resident_clusters, cuda::kMaxClusterSize + 1, facts.resident_clusters);
      return 0;
    };
    REQUIRE(cuda::choose_config(problem, gpu, cuda::cost_model(), known, load, choice) == 0);
    return cuda::strategy_of(choice.config);
  };
  using Times = cuda::StrategyTimes;
  CHECK(chosen(*a100, 16, {}) == kSkinny);
  CHECK(chosen(*a100, 16, Times{{-1, 9, -1, 8, 1}}) == kMultistage);
  CHECK(chosen(*a100, 16, Times{{-1, 7, -1, 8, 1}}) == kSkinny);
  CHECK(chosen(*a100, 17, Times{{-1, 7, -1, 8, 1}}) == kMultistage);
  CHECK(chosen(*a100, 17, Times{{2, 7, 1, 8, 1}}) == 0);  // mma_64x64; there is no wgmma
  CHECK(chosen(*a100, 17, Times{{-1, 7, 1, -1, 1}}) == kMultistage);  // the library's rules
  CHECK(chosen(*h200, 16, Times{{-1, 7, 1, -1, 1}}) == 2);
  CHECK(chosen(*h200, 1, Times{{-1, -1, 1, -1, 1}}) == 2);
  CHECK(chosen(*h200, 64, Times{{-1, 1, 2, 1, 1}}) == 2);
}

TEST_CASE("costs are for weights that are quick to dequantize, in 16 bits", "[costs]") {
  cuda::CostedSize size;
  MatmulProblem problem{};
  problem.weight.blocksize_log2 = 6;
  problem.weight.rows = 10;
  problem.weight.cols = 20;
  problem.dtype = NF4_DTYPE_BF16;
  CHECK((cuda::find_costed_size(problem, size) && size.product == CostedProduct::kCodebook));
  CHECK((cuda::find_costed_size(cuda::transposed(problem), size) && size.rows == 10 &&
         size.product == CostedProduct::kGradient));
  problem.lora.rank = 8;
  CHECK((cuda::find_costed_size(problem, size) && size.product == CostedProduct::kCodebookLora));
  CHECK((cuda::find_costed_size(cuda::transposed(problem), size) &&
         size.product == CostedProduct::kGradientLora));
  problem.weight.blocksize_log2 = 5;
  CHECK(!cuda::find_costed_size(problem, size));
  problem.weight.blocksize_log2 = 6;
  problem.dtype = NF4_DTYPE_FP32;
  CHECK(!cuda::find_costed_size(problem, size));
  Int4MatmulProblem integers{};
  integers.dtype = NF4_DTYPE_BF16;
  integers.weight.rows = integers.weight.cols = 1024;
  integers.weight.group_size = 128;
  for (const auto &[layout, product] :
       {std::pair{NF4_INT4_GPTQ, CostedProduct::kGptq},
        std::pair{NF4_INT4_AWQ, CostedProduct::kAwq},
        std::pair{NF4_INT4_COMPRESSED_TENSORS, CostedProduct::kCompressedTensors}}) {
    integers.weight.layout = layout;
    CHECK((cuda::find_costed_size(integers, size) && size.product == product));
  }
  integers.weight.group_size = 32;
  CHECK(!cuda::find_costed_size(integers, size));
}
