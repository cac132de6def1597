#include "support/int4_cases.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "core/float16.hpp"
#include "support/cases.hpp"
#include "support/values.hpp"

namespace nf4::test {
namespace {

nf4_int4_sizes sizes_of(const nf4_int4_tensor &shape) {
  nf4_int4_sizes sizes{};
  sizes.struct_size = sizeof sizes;
  nf4_int4_tensor_sizes(&shape, &sizes);
  return sizes;
}

uint16_t to_bits(float x, nf4_dtype dtype) {
  return dtype == NF4_DTYPE_FP16 ? float_to_half(x) : float_to_bf16(x);
}

void fill_scales(Rng &rng, HostInt4Weight &weight, bool ordinary) {
  std::vector<uint8_t> &bytes = weight.bytes[kInt4Scales];
  const bool nasty = !ordinary && rng.one_in(4);
  for (size_t i = 0; i < bytes.size(); i += 2) {
    const float scale = 0.01f * (0.1f + std::fabs(rng.normal()));
    const uint16_t bits = nasty && rng.one_in(3) ? static_cast<uint16_t>(rng.bits())
                                                 : to_bits(scale, weight.shape.scales_dtype);
    std::memcpy(&bytes[i], &bits, 2);
  }
}

std::vector<uint8_t> shuffled(Rng &rng, std::vector<int32_t> numbers) {
  for (size_t i = numbers.size(); i > 1; --i)
    std::swap(numbers[i - 1], numbers[rng.below(static_cast<int64_t>(i))]);
  std::vector<uint8_t> bytes(numbers.size() * 4);
  if (!bytes.empty()) std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}

std::vector<uint8_t> random_g_idx(Rng &rng, const HostInt4Weight &weight, bool any) {
  std::vector<int32_t> g_idx(weight.shape.cols);
  const int64_t groups = weight.groups();
  const int64_t group_size = groups == 0 ? 1 : weight.shape.cols / groups;
  for (int64_t k = 0; k < weight.shape.cols; ++k)
    g_idx[k] = static_cast<int32_t>(any ? rng.below(groups) : k / group_size);
  return shuffled(rng, g_idx);
}

std::vector<uint8_t> random_permutation(Rng &rng, int64_t cols) {
  std::vector<int32_t> columns(cols);
  std::iota(columns.begin(), columns.end(), 0);
  return shuffled(rng, columns);
}

// x / s is a half and an integer for a scale s that is a power of two, symmetric or not.
void put_ties(Rng &rng, nf4_dtype dtype, uint8_t *out, int64_t elements) {
  const float scale = std::ldexp(1.0f, static_cast<int>(rng.between(-8, 3)));
  for (int64_t i = 0; i < elements; ++i) {
    const float x =
        scale * (i < 2 ? 7.5f - 15.0f * static_cast<float>(i)
                       : static_cast<float>(rng.between(-15, 15)) * (rng.one_in(2) ? 0.5f : 0.25f));
    const uint16_t bits = dtype == NF4_DTYPE_FP32 ? 0 : to_bits(x, dtype);
    if (dtype == NF4_DTYPE_FP32)
      std::memcpy(out + i * 4, &x, 4);
    else
      std::memcpy(out + i * 2, &bits, 2);
  }
}

const char *name_of(nf4_int4_layout layout) {
  return layout == NF4_INT4_GPTQ ? "GPTQ" : layout == NF4_INT4_AWQ ? "AWQ" : "compressed-tensors";
}

}  // namespace

int64_t HostInt4Weight::groups() const { return sizes_of(shape).groups; }

nf4_int4_tensor HostInt4Weight::at(const std::array<void *, kInt4PartCount> &addresses) const {
  nf4_int4_tensor tensor = shape;
  tensor.packed = addresses[kInt4Packed];
  tensor.scales = addresses[kInt4Scales];
  tensor.zeros = addresses[kInt4Zeros];
  tensor.g_idx = static_cast<const int32_t *>(addresses[kInt4GIdx]);
  tensor.permutation = static_cast<const int32_t *>(addresses[kInt4Permutation]);
  return tensor;
}

nf4_int4_tensor HostInt4Weight::in_place() {
  std::array<void *, kInt4PartCount> addresses{};
  for (int part = 0; part < kInt4PartCount; ++part)
    if (has(part)) addresses[part] = bytes[part].data();
  return at(addresses);
}

std::vector<Int4Class> int4_classes(ColumnOrder order) {
  std::vector<Int4Class> classes;
  for (const nf4_int4_layout layout : kInt4Layouts)
    for (const nf4_dtype scales : {NF4_DTYPE_FP16, NF4_DTYPE_BF16}) {
      classes.push_back({layout, scales, false, 0, order});
      classes.push_back({layout, scales, true, 0, order});
      if (layout == NF4_INT4_GPTQ) classes.push_back({layout, scales, true, 1, order});
    }
  return classes;
}

Int4Shape random_int4_shape(Rng &rng, nf4_int4_layout layout) {
  const int32_t sizes[] = {8, 16, 24, 32, 64, 64, 128, 128, 192, 256};
  const bool one_group = rng.one_in(4);
  int32_t group_size = rng.pick(sizes);
  const int64_t most = std::max<int64_t>(1, 640 / group_size);
  int64_t cols = group_size * rng.between(1, rng.one_in(8) ? 3 * most : most);
  if (one_group && layout != NF4_INT4_GPTQ) cols = rng.between(1, 400);
  if (one_group) group_size = -1;
  int64_t rows = rng.one_in(4) ? rng.between(1, 300) : rng.between(1, 70);
  if (rng.one_in(3)) rows = (rows + 63) / 64 * 64;
  if (layout == NF4_INT4_AWQ) rows = (rows + 7) / 8 * 8;
  return {rows, cols, group_size};
}

HostInt4Weight empty_int4_weight(const Int4Class &kind, const Int4Shape &shape) {
  HostInt4Weight weight{};
  weight.shape.struct_size = sizeof weight.shape;
  weight.shape.layout = kind.layout;
  weight.shape.scales_dtype = kind.scales_dtype;
  weight.shape.group_size = shape.group_size;
  weight.shape.zero_offset = kind.zero_offset;
  weight.shape.rows = shape.rows;
  weight.shape.cols = shape.cols;
  const nf4_int4_sizes sizes = sizes_of(weight.shape);
  weight.bytes[kInt4Packed].resize(sizes.packed_bytes);
  weight.bytes[kInt4Scales].resize(sizes.scales_bytes);
  if (kind.zeros) weight.bytes[kInt4Zeros].resize(sizes.zeros_bytes);
  return weight;
}

HostInt4Weight random_int4_weight(Rng &rng, const Int4Class &kind, const Int4Shape &shape,
                                  bool ordinary_scales) {
  HostInt4Weight weight = empty_int4_weight(kind, shape);
  for (const Int4Part part : {kInt4Packed, kInt4Zeros})
    rng.fill(weight.bytes[part].data(), weight.bytes[part].size());
  fill_scales(rng, weight, ordinary_scales);
  const bool any = kind.order == ColumnOrder::kAnyGIdx;
  if (any || kind.order == ColumnOrder::kGIdx || kind.order == ColumnOrder::kBoth)
    weight.bytes[kInt4GIdx] = random_g_idx(rng, weight, any);
  if (kind.order == ColumnOrder::kPermutation || kind.order == ColumnOrder::kBoth)
    weight.bytes[kInt4Permutation] = random_permutation(rng, shape.cols);
  return weight;
}

HostInt4Weight random_int4_stack(Rng &rng, const Int4Class &kind, const Int4Shape &shape,
                                 int experts) {
  HostInt4Weight stack = random_int4_weight(rng, kind, shape, true);
  for (int e = 1; e < experts; ++e) {
    const HostInt4Weight next = random_int4_weight(rng, kind, shape, true);
    for (int part = 0; part < kInt4PartCount; ++part)
      stack.bytes[part].insert(stack.bytes[part].end(), next.bytes[part].begin(),
                               next.bytes[part].end());
  }
  return stack;
}

HostInt4Weight expert_of(const HostInt4Weight &stack, int experts, int expert) {
  HostInt4Weight one = stack;
  for (int part = 0; part < kInt4PartCount; ++part) {
    const std::vector<uint8_t> &all = stack.bytes[part];
    const size_t bytes = all.size() / experts;
    one.bytes[part].assign(all.begin() + bytes * expert, all.begin() + bytes * (expert + 1));
  }
  return one;
}

std::vector<float> int4_elements(HostInt4Weight weight) {
  std::vector<float> elements(weight.elements());
  const nf4_int4_tensor tensor = weight.in_place();
  if (nf4_int4_dequant_cpu(&tensor, elements.data(), NF4_DTYPE_FP32, 1) != NF4_STATUS_OK)
    throw std::runtime_error(nf4_last_error());
  return elements;
}

std::vector<float> int4_magnitudes(HostInt4Weight weight) {
  std::fill(weight.bytes[kInt4Packed].begin(), weight.bytes[kInt4Packed].end(), 0);
  weight.bytes[kInt4Zeros].clear();
  weight.shape.zero_offset = 0;
  std::vector<float> parts = int4_elements(std::move(weight));
  for (float &part : parts) part *= -2;
  return parts;
}

HostInt4Weight sorted_shape(HostInt4Weight weight) {
  weight.bytes[kInt4GIdx].clear();
  weight.bytes[kInt4Permutation].resize(weight.shape.cols * 4);
  return weight;
}

std::vector<uint8_t> random_int4_input(Rng &rng, nf4_dtype dtype, const HostInt4Weight &weight) {
  const int64_t group_size = weight.groups() == 0 ? 1 : weight.shape.cols / weight.groups();
  std::vector<uint8_t> in = random_input(rng, dtype, static_cast<int>(group_size),
                                         weight.elements(), nf4_codebook(NF4_FORMAT_NF4));
  for (int64_t i = 0; i < weight.elements(); i += group_size)
    if (rng.one_in(6)) put_ties(rng, dtype, &in[i * dtype_bytes(dtype)], group_size);
  return in;
}

std::string describe(const HostInt4Weight &weight, uint64_t stream) {
  const nf4_int4_tensor &shape = weight.shape;
  std::ostringstream text;
  text << "NF4_TEST_SEED=" << run_seed() << " stream " << stream << ": " << name_of(shape.layout)
       << ", " << shape.rows << " x " << shape.cols << ", group_size " << shape.group_size << ", "
       << (shape.scales_dtype == NF4_DTYPE_FP16 ? "fp16" : "bf16") << " scales"
       << (weight.has(kInt4Zeros) ? ", zeros" : "") << ", zero_offset " << shape.zero_offset
       << (weight.has(kInt4GIdx) ? ", g_idx" : "")
       << (weight.has(kInt4Permutation) ? ", permutation" : "");
  return text.str();
}

}  // namespace nf4::test
