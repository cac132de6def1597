// Every CUDA kernel that this GPU runs against the scalar reference, bit for bit, on
// random shapes, tails, alignments, blocksizes and tables.
#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "cuda/dequant/choose.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/device.hpp"
#include "support/families.hpp"
#include "support/force.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

// Per dtype, blocksize and flat/nested: of formats and of the caller's codebooks in turn.
int shapes() { return shapes_or(150); }

// The formats and the caller's codebooks in turn; classes start at different ones, and the caller's
// codebooks go on from class to class, so that even few shapes in each class meet all of them.
CodebookKind codebook_of_shape(int kind, int i) {
  const int format = (i + kind) % (kFormatCount + 1);
  if (format < kFormatCount) return codebook_kind(format);
  const int own = (kind + i / (kFormatCount + 1)) % (kCodebookKindCount - kFormatCount);
  return codebook_kind(kFormatCount + own);
}

constexpr cuda::DequantConfig kConfigs[] = {cuda::kUnaligned, cuda::kWarpTile512,
                                            cuda::kWarpTile1024};

class ForcedConfig {
 public:
  explicit ForcedConfig(cuda::DequantConfig config) { cuda::force_dequant(config); }
  ~ForcedConfig() { cuda::force_dequant(std::nullopt); }
  ForcedConfig(const ForcedConfig &) = delete;
  ForcedConfig &operator=(const ForcedConfig &) = delete;
};

// The addresses of a host weight's own bytes: std::vector aligns them for any type.
nf4_tensor in_place(HostWeight &weight) {
  std::array<void *, kPartCount> addresses{};
  for (int part = 0; part < kPartCount; ++part)
    if (weight.has(Part(part))) addresses[part] = weight.bytes[part].data();
  return weight.at(addresses);
}

std::vector<uint8_t> expected_output(DequantCase &test) {
  const ForcedVariant forced(scalar_variant());
  std::vector<uint8_t> out(test.out_bytes());
  const nf4_tensor tensor = in_place(test.weight);
  REQUIRE(nf4_dequant_cpu(&tensor, out.data(), test.dtype, 0) == NF4_STATUS_OK);
  return out;
}

void check_dequant(DequantCase &test, Rng &rng, const Stream &stream) {
  const DeviceWeight weight(rng, test.weight);
  const std::vector<uint8_t> expected = expected_output(test);
  const size_t lead = random_lead(rng, dtype_bytes(test.dtype));
  for (const cuda::GpuFamily *family : runnable_families()) {
    const ForcedFamily forced_family(family);
    for (const cuda::DequantConfig config : kConfigs) {
      INFO("family " << family->name << ", configuration " << config << ", out " << lead
                     << " bytes past an allocation");
      const ForcedConfig forced(config);
      const DeviceBuffer out(test.out_bytes(), lead);
      REQUIRE(nf4_dequant_launch(&weight.tensor(), out.data(), test.dtype, stream) ==
              NF4_STATUS_OK);
      stream.synchronize();
      REQUIRE(first_difference(test.dtype, out.read().data(), expected.data(),
                               test.weight.elements()) == kNoDifference);
      REQUIRE(out.lead_intact());
    }
  }
  REQUIRE(weight.leads_intact());
}

constexpr Part kOutputs[] = {kPacked, kAbsmax, kNestedAbsmax, kNestedOffset};

void quantize_on_cpu(QuantizeCase &test) {
  const ForcedVariant forced(scalar_variant());
  std::vector<double> workspace(test.workspace_bytes / 8 + 2);  // 16-byte aligned by malloc
  const nf4_tensor tensor = in_place(test.weight);
  REQUIRE(nf4_quantize_cpu(test.in.data(), test.dtype, &tensor, workspace.data(),
                           test.workspace_bytes, 0) == NF4_STATUS_OK);
}

void check_quantize(QuantizeCase &test, Rng &rng, const Stream &stream) {
  std::vector<DeviceWeight> weights;
  const auto families = runnable_families();
  for (size_t i = 0; i < families.size(); ++i) weights.emplace_back(rng, test.weight);
  DeviceBuffer in(test.in.size(), random_lead(rng, dtype_bytes(test.dtype)));
  in.write(test.in.data());
  const DeviceBuffer workspace(test.workspace_bytes);
  quantize_on_cpu(test);
  for (size_t i = 0; i < families.size(); ++i) {
    INFO("family " << families[i]->name);
    const ForcedFamily forced(families[i]);
    REQUIRE(nf4_quantize_launch(in.data(), test.dtype, &weights[i].tensor(), workspace.data(),
                                test.workspace_bytes, stream) == NF4_STATUS_OK);
    stream.synchronize();
    for (const Part part : kOutputs) {
      if (!test.weight.has(part)) continue;
      INFO(part_name(part));
      const std::vector<uint8_t> got = weights[i].read(part);
      REQUIRE(first_difference(got.data(), test.weight.bytes[part].data(),
                               static_cast<int64_t>(got.size())) == kNoDifference);
    }
    REQUIRE(weights[i].leads_intact());
  }
  REQUIRE(same_bytes(in.read(), test.in));
}

// A case of many elements, made in little time: the same megabyte or so over and over, of
// a length that shifts it against the blocks each time.
QuantizeCase repeated_quantize_case(Rng &rng, const CaseClass &kind, int64_t elements,
                                    int nested_blocksize) {
  const auto part = random_quantize_case(rng, kind, CodebookKind::kNf4, (1 << 20) + 13);
  QuantizeCase result{
      kind.dtype, {}, random_shape(rng, kind, CodebookKind::kNf4, elements, nested_blocksize), 0};
  REQUIRE(nf4_quantize_workspace_size(&result.weight.shape, &result.workspace_bytes) ==
          NF4_STATUS_OK);
  const size_t bytes = elements * dtype_bytes(kind.dtype);
  result.in.reserve(bytes + part.in.size());
  while (result.in.size() < bytes)
    result.in.insert(result.in.end(), part.in.begin(), part.in.end());
  result.in.resize(bytes);
  return result;
}

template <class MakeCase, class Check>
void sweep(uint64_t stream_number, const MakeCase &make_case, const Check &check) {
  const Stream stream;
  int number = 0;
  for (const CaseClass &kind : case_classes()) {
    for (int i = 0; i < shapes(); ++i) {
      Rng rng(++stream_number);
      auto test =
          make_case(rng, kind, codebook_of_shape(number, i), random_elements(rng, kind.blocksize));
      INFO(describe(test.weight, test.dtype, stream_number));
      check(test, rng, stream);
    }
    ++number;
  }
}

}  // namespace

TEST_CASE("every kernel dequantizes to the bits of the reference", "[cuda]") {
  sweep(0x3000000, random_dequant_case, check_dequant);
}

TEST_CASE("quantize gives the bytes of the reference", "[cuda]") {
  sweep(0x4000000, random_quantize_case, check_quantize);
}

TEST_CASE("MXFP4 and NVFP4 have the bits of the reference", "[cuda][e2m1]") {
  const Stream stream;
  uint64_t number = 0x33000000;
  for (const nf4_dtype dtype : kDtypes)
    for (const CaseClass &kind : byte_classes(dtype))
      for (int i = 0; i < shapes(); ++i) {
        Rng rng(++number);
        const int64_t cols = rng.between(1, 60) * kind.blocksize;
        DequantCase stored{dtype, random_byte_weight(rng, kind, rng.between(1, 90), cols, false)};
        INFO(describe(stored.weight, dtype, number));
        check_dequant(stored, rng, stream);
        QuantizeCase dense{dtype, std::vector<uint8_t>(stored.out_bytes()), stored.weight, 0};
        rng.fill(dense.in.data(), dense.in.size());
        check_quantize(dense, rng, stream);
      }
}

// Prefetching begins beyond 8M elements; of the outputs, those of 32 bits and 18M elements are not
// kept in L2.
TEST_CASE("dequantize of enough elements to prefetch", "[cuda]") {
  const Stream stream;
  uint64_t number = 0x7000000;
  for (const nf4_dtype dtype : kDtypes)
    for (const bool nested : {false, true})
      for (const int blocksize : {32, 64, 4096}) {
        Rng rng(++number);
        const int64_t elements = (blocksize == 64 ? 18'000'000 : 9'000'000) + rng.below(5000);
        DequantCase test =
            random_dequant_case(rng, {dtype, blocksize, nested}, CodebookKind::kNf4, elements);
        INFO(describe(test.weight, test.dtype, number));
        check_dequant(test, rng, stream);
      }
}

// Cases that random shapes seldom meet: several thread blocks of scales, nested blocks larger
// than a thread block, and partial sums that need a level more.
TEST_CASE("quantize of many scales", "[cuda]") {
  const struct {
    int nested_blocksize;
    int64_t blocks;
  } scales[] = {{1, 1500},     {32, 5000},       {512, 1500},         {1024, 3000},
                {4096, 10000}, {1 << 30, 20000}, {256, (1 << 20) + 5}};
  const Stream stream;
  uint64_t number = 0x8000000;
  for (const auto &[nested_blocksize, blocks] : scales) {
    Rng rng(++number);
    QuantizeCase test =
        repeated_quantize_case(rng, {NF4_DTYPE_FP16, 32, true}, blocks * 32 - 7, nested_blocksize);
    INFO(describe(test.weight, test.dtype, number));
    check_quantize(test, rng, stream);
  }
}

// The last of more than 2^31 elements, and everything before.
TEST_CASE("more than 2^31 elements", "[cuda][large]") {
  constexpr int64_t kElements = (int64_t{1} << 31) + 4096 * 3 + 77;
  const CaseClass kind{NF4_DTYPE_BF16, 64, true};
  const Stream stream;
  Rng rng(0x5000000);
  SECTION("dequantize") {
    DequantCase test = random_dequant_case(rng, kind, CodebookKind::kNf4, kElements);
    check_dequant(test, rng, stream);
  }
  SECTION("quantize") {
    QuantizeCase test = repeated_quantize_case(rng, kind, kElements, 256);
    check_quantize(test, rng, stream);
  }
}
