// The costs that are part of the library, with the rows of a GPU: the folder built_in_costs has
// them in the place of those of lib/cuda/costs/built_in. Prints TAP.
#include <cstdio>
#include <string>

#include "cuda/backend.hpp"
#include "cuda/costs/built_in.hpp"
#include "cuda/costs/text.hpp"

using namespace nf4::cuda;

namespace {

constexpr int kSkinny = static_cast<int>(MatmulKernel::kSkinny);
constexpr CostedGpu kGpu{80, 108, 166912, 13000, "sm80", "GPU of a test"};
constexpr double kUnknown = -1;
int count = 0;

double time_of(int strategy, const CostedGpu &gpu = kGpu) {
  return find_times(gpu, {CostedProduct::kCodebook, NF4_DTYPE_FP16, 8, 4000, 1000}).us[strategy];
}

void check(bool holds, const char *what) {
  std::printf("%s %d - %s\n", holds ? "ok" : "not ok", ++count, what);
}

nf4_status set(const std::string &gpu, const std::string &row) {
  const std::string text = std::string(NF4_COSTS_FIRST_LINE "\n") + gpu + row + "end\n";
  return set_costs(text.data(), text.size());
}

}  // namespace

int main() {
  check(have_built_in_costs() && have_costs(), "the library has costs");
  check(built_in_costs().gpu_count == 1 && built_in_costs().row_count == 2, "they are parsed");
  check(time_of(kSkinny) == 2.5 && time_of(kDenseStrategy) == 4, "a product has their times");
  CostedGpu other = kGpu;
  other.driver_version = 12080;
  check(time_of(kSkinny, other) == 2.5 && have_built_in_costs_of(other), "they are for any driver");
  other.multiprocessors = 98;
  check(time_of(kSkinny, other) == kUnknown && !have_built_in_costs_of(other),
        "they are for no other GPU");

  const std::string own = "gpu 80 sm80 108 166912 13000 GPU of a test\n";
  const std::string row = "codebook fp16 skinny 8 7 0 0 0\n";
  check(set(own, row) == NF4_STATUS_OK && time_of(kSkinny) == 7, "the caller's take precedence");
  check(time_of(kDenseStrategy) == kUnknown, "they are not mixed with the caller's");
  other = kGpu;
  other.driver_version = 12080;
  check(time_of(kSkinny, other) == 2.5, "they stay for a driver that the caller's are not for");
  check(set_costs(nullptr, 0) == NF4_STATUS_OK && time_of(kSkinny) == 2.5,
        "they cannot be removed");
  std::printf("1..%d\n", count);
}
