// Dequantize, quantize and reorder of integer weights on every family of kernels that this GPU
// runs, against the scalar reference, bit for bit.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "cuda/dequant/int4_choose.hpp"
#include "cuda/permute/permute.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/device.hpp"
#include "support/families.hpp"
#include "support/force.hpp"
#include "support/int4_cases.hpp"
#include "validate.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

// Per class of weights and dtype.
int shapes() { return shapes_or(12); }

class ForcedAny {
 public:
  explicit ForcedAny(bool any) { cuda::force_int4_dequant_any(any); }
  ~ForcedAny() { cuda::force_int4_dequant_any(false); }
  ForcedAny(const ForcedAny &) = delete;
  ForcedAny &operator=(const ForcedAny &) = delete;
};

// Aligned buffers in one case of two, so that the fast kernels are met often.
struct Placement {
  bool aligned;
  explicit Placement(Rng &rng) : aligned(rng.one_in(2)) {}
  size_t lead(Rng &rng, int alignment) const { return aligned ? 0 : random_lead(rng, alignment); }
};

bool takes_aligned(const nf4_int4_tensor &weight, void *out, nf4_dtype dtype) {
  Int4DequantProblem problem;
  REQUIRE(validate_dequant(&weight, out, dtype, problem) == NF4_STATUS_OK);
  return cuda::is_aligned(problem);
}

// Did an aligned kernel do it?
bool check_dequant(HostInt4Weight &host, nf4_dtype dtype, Rng &rng, const Stream &stream) {
  const ForcedVariant scalar(scalar_variant());
  const size_t bytes = host.elements() * dtype_bytes(dtype);
  std::vector<uint8_t> expected(bytes);
  const nf4_int4_tensor on_host = host.in_place();
  REQUIRE(nf4_int4_dequant_cpu(&on_host, expected.data(), dtype, 0) == NF4_STATUS_OK);

  const Placement placement(rng);
  const DeviceInt4Weight weight(rng, host, placement.aligned);
  const size_t lead = placement.lead(rng, dtype_bytes(dtype));
  constexpr size_t kTail = 64;
  bool aligned = false;
  for (const cuda::GpuFamily *family : runnable_families())
    for (const bool any : {false, true}) {
      INFO("family " << family->name << (any ? ", the kernel for any weight" : "") << ", out "
                     << lead << " bytes past an allocation");
      const ForcedFamily forced_family(family);
      const ForcedAny forced(any);
      const DeviceBuffer out(bytes, lead);
      const DeviceBuffer guarded(bytes + kTail, lead);
      for (const DeviceBuffer *buffer : {&out, &guarded}) {
        REQUIRE(nf4_int4_dequant_launch(&weight.tensor(), buffer->data(), dtype, stream) ==
                NF4_STATUS_OK);
        stream.synchronize();
        aligned |= takes_aligned(weight.tensor(), buffer->data(), dtype);
        const std::vector<uint8_t> got = buffer->read();
        REQUIRE(first_difference(dtype, got.data(), expected.data(), host.elements()) ==
                kNoDifference);
        REQUIRE(std::all_of(got.begin() + static_cast<std::ptrdiff_t>(bytes), got.end(),
                            [](uint8_t byte) { return byte == 0xa5; }));
        REQUIRE(buffer->lead_intact());
      }
    }
  REQUIRE(weight.leads_intact());
  return aligned;
}

constexpr Int4Part kQuantized[] = {kInt4Packed, kInt4Scales, kInt4Zeros};

void check_quantize(HostInt4Weight &host, nf4_dtype dtype, bool symmetric, Rng &rng,
                    const Stream &stream) {
  const ForcedVariant scalar(scalar_variant());
  const std::vector<uint8_t> input = random_int4_input(rng, dtype, host);
  const Placement placement(rng);
  std::vector<DeviceInt4Weight> weights;
  const auto families = runnable_families();
  for (size_t i = 0; i < families.size(); ++i) weights.emplace_back(rng, host, placement.aligned);
  DeviceBuffer in(input.size(), placement.lead(rng, dtype_bytes(dtype)));
  in.write(input.data());
  const nf4_int4_tensor on_host = host.in_place();
  REQUIRE(nf4_int4_quantize_cpu(input.data(), dtype, &on_host, symmetric, 0) == NF4_STATUS_OK);
  for (size_t i = 0; i < families.size(); ++i) {
    INFO("family " << families[i]->name);
    const ForcedFamily forced(families[i]);
    REQUIRE(nf4_int4_quantize_launch(in.data(), dtype, &weights[i].tensor(), symmetric, stream) ==
            NF4_STATUS_OK);
    stream.synchronize();
    for (const Int4Part part : kQuantized) {
      if (!host.has(part)) continue;
      INFO("part " << part);
      const std::vector<uint8_t> got = weights[i].read(part);
      REQUIRE(first_difference(got.data(), host.bytes[part].data(),
                               static_cast<int64_t>(got.size())) == kNoDifference);
    }
    REQUIRE(weights[i].leads_intact());
  }
  REQUIRE(same_bytes(in.read(), input));
}

void check_reorder(HostInt4Weight &host, Rng &rng, const Stream &stream) {
  const ForcedVariant scalar(scalar_variant());
  HostInt4Weight sorted = sorted_shape(host);
  std::fill(sorted.bytes[kInt4Packed].begin(), sorted.bytes[kInt4Packed].end(), 0xa5);
  const Placement placement(rng);
  const DeviceInt4Weight from(rng, host, placement.aligned);
  std::vector<DeviceInt4Weight> to;
  const auto families = runnable_families();
  for (size_t i = 0; i < families.size(); ++i) to.emplace_back(rng, sorted, placement.aligned);
  const nf4_int4_tensor from_host = host.in_place();
  const nf4_int4_tensor to_host = sorted.in_place();
  REQUIRE(nf4_int4_reorder_cpu(&from_host, &to_host, 0) == NF4_STATUS_OK);
  for (size_t i = 0; i < families.size(); ++i) {
    INFO("family " << families[i]->name);
    const ForcedFamily forced(families[i]);
    REQUIRE(nf4_int4_reorder_launch(&from.tensor(), &to[i].tensor(), stream) == NF4_STATUS_OK);
    stream.synchronize();
    for (const Int4Part part : {kInt4Permutation, kInt4Packed}) {
      INFO("part " << part);
      REQUIRE(same_bytes(to[i].read(part), sorted.bytes[part]));
    }
    REQUIRE(to[i].leads_intact());
  }
  REQUIRE(from.leads_intact());
}

// x with its columns in the order of a permutation, rows from `stride` elements apart.
void check_permute_x(const Int4Shape &shape, int64_t m, int64_t stride, Rng &rng,
                     const Stream &stream) {
  const HostInt4Weight host = random_int4_weight(
      rng, {NF4_INT4_COMPRESSED_TENSORS, NF4_DTYPE_BF16, false, 0, ColumnOrder::kPermutation},
      shape);
  const DeviceInt4Weight weight(rng, host);
  std::vector<uint16_t> x(m * stride);
  rng.fill(x.data(), x.size() * 2);
  DeviceBuffer from(x.size() * 2, random_lead(rng, 2));
  from.write(x.data());
  Int4MatmulProblem problem{};
  problem.weight.cols = shape.cols;
  problem.weight.permutation = weight.tensor().permutation;
  problem.x = from.data();
  problem.x_stride = stride;
  problem.m = m;
  const auto *permutation = reinterpret_cast<const int32_t *>(host.bytes[kInt4Permutation].data());
  cuda::Device device;
  REQUIRE(cuda::cached_device(0, device) == NF4_STATUS_OK);
  for (const cuda::GpuFamily *family : runnable_families()) {
    INFO("family " << family->name << ", m " << m << ", x_stride " << stride);
    const DeviceBuffer to(m * shape.cols * 2);
    REQUIRE_CUDA(cuda::permute_x(problem, to.data(), {device, family, stream}));
    stream.synchronize();
    const std::vector<uint8_t> got = to.read();
    int64_t differences = 0;
    for (int64_t i = 0; i < m; ++i)
      for (int64_t k = 0; k < shape.cols; ++k)
        differences +=
            std::memcmp(&got[(i * shape.cols + k) * 2], &x[i * stride + permutation[k]], 2) != 0;
    REQUIRE(differences == 0);
  }
}

template <class Check>
void sweep(uint64_t number, ColumnOrder order, const Check &check) {
  const Stream stream;
  for (const Int4Class &kind : int4_classes(order))
    for (int i = 0; i < shapes(); ++i) {
      Rng rng(++number);
      const Int4Shape shape = random_int4_shape(rng, kind.layout);
      check(kind, shape, number, rng, stream);
    }
}

}  // namespace

TEST_CASE("integer weights dequantize to the bits of the reference", "[cuda][int4]") {
  uint64_t number = 0xa000000;
  for (const ColumnOrder order : kColumnOrders)
    sweep(number += 0x10000, order,
          [](const Int4Class &kind, const Int4Shape &shape, uint64_t id, Rng &rng,
             const Stream &stream) {
            HostInt4Weight weight = random_int4_weight(rng, kind, shape);
            INFO(describe(weight, id));
            for (const nf4_dtype dtype : kDtypes) check_dequant(weight, dtype, rng, stream);
          });
}

// The tiles of the aligned kernels, at the ends of rows and of weights.
TEST_CASE("integer weights of groups that are multiples of 64", "[cuda][int4]") {
  const Stream stream;
  uint64_t number = 0xb000000;
  std::map<nf4_int4_layout, int> aligned;
  for (const Int4Class &kind : int4_classes())
    for (const int32_t group_size : {64, 128, 192, 256, 1024, -1})
      for (const int64_t rows : {1, 2, 8, 12, 40, 96, 128, 320}) {
        Rng rng(++number);
        if (few_shapes() && !rng.one_in(4)) continue;
        const int64_t cols = (group_size == -1 ? 64 : group_size) * rng.between(1, 5);
        const bool octets = kind.layout == NF4_INT4_AWQ;
        const Int4Shape shape{octets ? (rows + 7) / 8 * 8 : rows, cols, group_size};
        HostInt4Weight weight = random_int4_weight(rng, kind, shape);
        INFO(describe(weight, number));
        aligned[kind.layout] += check_dequant(weight, rng.pick(kDtypes), rng, stream);
      }
  for (const nf4_int4_layout layout : kInt4Layouts)
    REQUIRE(aligned[layout] > (few_shapes() ? 2 : 20));
}

TEST_CASE("quantize to integer weights gives the bytes of the reference", "[cuda][int4]") {
  sweep(0xc000000, ColumnOrder::kPlain,
        [](const Int4Class &kind, const Int4Shape &shape, uint64_t id, Rng &rng,
           const Stream &stream) {
          for (const nf4_dtype dtype : kDtypes)
            for (const bool symmetric : {true, false}) {
              if (!symmetric && !kind.zeros) continue;
              HostInt4Weight weight = empty_int4_weight(kind, shape);
              INFO(describe(weight, id) << ", dtype " << dtype << ", symmetric " << symmetric);
              check_quantize(weight, dtype, symmetric, rng, stream);
            }
        });
}

TEST_CASE("reorder sorts the columns of integer weights", "[cuda][int4]") {
  uint64_t number = 0xd000000;
  for (const ColumnOrder order : {ColumnOrder::kGIdx, ColumnOrder::kAnyGIdx})
    sweep(number += 0x10000, order,
          [](const Int4Class &kind, const Int4Shape &shape, uint64_t id, Rng &rng,
             const Stream &stream) {
            HostInt4Weight weight = random_int4_weight(rng, kind, shape);
            INFO(describe(weight, id));
            check_reorder(weight, rng, stream);
          });
}

TEST_CASE("the columns of x in the order of a weight's", "[cuda][int4]") {
  const Stream stream;
  uint64_t number = 0xe000000;
  for (const int64_t cols : {1, 7, 64, 1000, 4096, 14336, 28672})
    for (const int64_t m : {1, 3, 16, 33, 40, 131}) {
      Rng rng(++number);
      check_permute_x({8, cols, -1}, m, cols + (rng.one_in(2) ? 0 : rng.between(0, 9)), rng,
                      stream);
    }
}

// The layout's kernel and the one for any weight.
TEST_CASE("integer weights of more than 2^31 elements", "[cuda][int4][large]") {
  constexpr Int4Shape kShape{16416, 131072, 128};
  static_assert(kShape.rows * kShape.cols > int64_t{1} << 31);
  const Stream stream;
  Rng rng(0xf800000);
  const DeviceBuffer out(kShape.rows * kShape.cols * 2);
  std::vector<uint8_t> expected(out.size()), got(out.size());
  for (const nf4_int4_layout layout : kInt4Layouts) {
    HostInt4Weight host = random_int4_weight(rng, {layout, NF4_DTYPE_FP16, true, 0}, kShape, true);
    INFO(describe(host, 0));
    const DeviceInt4Weight weight(rng, host, true);
    const nf4_int4_tensor on_host = host.in_place();
    REQUIRE(nf4_int4_dequant_cpu(&on_host, expected.data(), NF4_DTYPE_FP16, 0) == NF4_STATUS_OK);
    for (const bool any : {false, true}) {
      INFO((any ? "the kernel for any weight" : "the layout's"));
      const ForcedAny forced(any);
      REQUIRE(takes_aligned(weight.tensor(), out.data(), NF4_DTYPE_FP16) != any);
      fill_bytes(out.data(), 0xa5, out.size());
      REQUIRE(nf4_int4_dequant_launch(&weight.tensor(), out.data(), NF4_DTYPE_FP16, stream) ==
              NF4_STATUS_OK);
      stream.synchronize();
      REQUIRE_CUDA(cudaMemcpy(got.data(), out.data(), got.size(), cudaMemcpyDeviceToHost));
      CHECK(same_bytes(got, expected));
    }
  }
}
