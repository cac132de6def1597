// The GPU families of this build, as selection sees them. Needs no GPU.
#include <set>

#include "cuda/dequant/kernels.hpp"
#include "cuda/lora/kernels.hpp"
#include "cuda/matmul/kernels.hpp"
#include "cuda/matmul/multistage/kernels.hpp"
#include "cuda/matmul_grad/kernels.hpp"
#include "cuda/matmul_grouped/kernels.hpp"
#include "cuda/quantize/kernels.hpp"
#include "cuda/runtime/families.hpp"
#include "support/catch.hpp"

using namespace nf4;

namespace {

// A table of kernels, each of which no other entry is; `missing` may be NULL.
template <class Kernels>
void check_kernels(const Kernels &kernels, size_t missing, std::set<const void *> &seen) {
  const auto *begin = reinterpret_cast<const void *const *>(&kernels);
  size_t none = 0;
  for (const auto *kernel = begin; kernel != begin + sizeof kernels / sizeof *begin; ++kernel)
    if (*kernel == nullptr)
      ++none;
    else
      CHECK(seen.insert(*kernel).second);
  CHECK(none == missing);
}

}  // namespace

TEST_CASE("the best family that was compiled for a GPU runs on it", "[families]") {
  for (const cuda::GpuFamily &family : cuda::kGpuFamilies) {
    INFO("family " << family.name);
    for (const int *arch = family.archs; *arch != 0; ++arch) {
      INFO("compute capability " << *arch);
      CHECK(cuda::family_for(*arch) == &family);
      if ((*arch + 1) / 10 == *arch / 10) CHECK(family.runs_on(*arch + 1));  // same major version
    }
    if (family.archs[0] != 0 && family.ptx == 0) CHECK(!family.runs_on(family.archs[0] - 1));
    if (family.ptx != 0) CHECK(family.runs_on(990));  // compiled from PTX
  }
  CHECK(cuda::family_for(70) == nullptr);
}

TEST_CASE("a forced family is used for every GPU", "[families]") {
  for (const cuda::GpuFamily &family : cuda::kGpuFamilies) {
    cuda::force_family(&family);
    CHECK(cuda::family_for(70) == &family);
  }
  cuda::force_family(nullptr);
  CHECK(cuda::family_for(70) == nullptr);
}

TEST_CASE("every family has every operation's kernels", "[families]") {
  std::set<const void *> seen;
  for (const cuda::GpuFamily &family : cuda::kGpuFamilies) {
    INFO("family " << family.name);
    check_kernels(cuda::kernels_of<cuda::DequantKernels>(family), 0, seen);
    check_kernels(cuda::kernels_of<cuda::QuantizeKernels>(family), 0, seen);
    // Skinny kernels of fp32 have the wide layout alone, and none for scales of 8 bits; those of 16
    // rows of x in 16 bits have it with TMA. Turing's layout has fp16, one weight and batches.
    constexpr size_t kSkinny = cuda::kSkinnyCount, kOfDtype = 3 * cuda::kScaleKindCount * kSkinny;
    const size_t no_wide_16 = family.tensor_maps ? 0 : 2 * kOfDtype / kSkinny;
    const size_t wide = 3 * kOfDtype - 3 * kSkinny - no_wide_16;
    const size_t turing = 2 * cuda::kScaleKindCount * kSkinny;
    const size_t skinny = family.tensor_cores ? wide + 2 * kOfDtype : turing;
    check_kernels(cuda::kernels_of<cuda::MatmulKernels>(family),
                  cuda::kSkinnyLayoutCount * 3 * kOfDtype - skinny, seen);
    // Turing's are of fp16, without the widest tile; of scales in fp32 and of 8 bits.
    constexpr size_t kNotTurings = 2 * (cuda::kMultistageCount + 1);
    check_kernels(cuda::kernels_of<cuda::MultistageKernels>(family),
                  family.tensor_cores ? 0 : kNotTurings, seen);
    // Turing has no kernels of AWQ, and none of the gradient.
    constexpr size_t kTiles = cuda::kMultistageCount;
    check_kernels(cuda::kernels_of<cuda::Int4MultistageKernels>(family),
                  family.tensor_cores ? 0 : (3 + 1) * kTiles, seen);
    check_kernels(cuda::kernels_of<cuda::GradMultistageKernels>(family),
                  family.tensor_cores ? 0 : 2 * kTiles, seen);
    check_kernels(cuda::kernels_of<cuda::GroupedMultistageKernels>(family),
                  family.tensor_cores ? 0 : kNotTurings, seen);
    check_kernels(cuda::kernels_of<cuda::GradKernels>(family), family.tensor_maps ? 0 : 2 * 2 * 2,
                  seen);
    check_kernels(cuda::kernels_of<cuda::LoraKernels>(family),
                  family.tensor_cores ? 0 : 2 * 2 * 2 * 2 * 2, seen);
    // Integer weights: those of AWQ copy with TMA, and there is no skinny_2. Wide strips, AWQ's and
    // GPTQ's skinny_8 and skinny_16, copy with TMA. Without tensor cores there are no kernels for
    // few rows of x.
    constexpr size_t kDtypes = 2;
    const size_t no_few = family.tensor_cores ? 0 : kDtypes * 3 * 2;
    const size_t gptq_and_row_packed = family.tensor_cores ? 0 : 2 * kSkinny;
    const size_t awq = family.tensor_maps ? 1 : kSkinny;
    const size_t no_wide = 3 * kSkinny - (family.tensor_maps ? 4 : 0);
    check_kernels(cuda::kernels_of<cuda::Int4MatmulKernels>(family),
                  no_few + kDtypes * (gptq_and_row_packed + awq + no_wide), seen);
  }
}
