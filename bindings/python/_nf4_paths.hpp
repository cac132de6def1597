// Keeps the answers of nf4_matmul_path, which way a product is expected to take less time, by
// everything that the answer depends on. libnf4 needs up to a microsecond for an answer, and a
// layer asks in every call.
#ifndef NF4_PATHS_HPP
#define NF4_PATHS_HPP

#include <array>
#include <cstdint>

#include "_nf4_checks.hpp"

namespace nf4_torch {

using PathKey = std::array<int64_t, 15>;

// The bits of a pointer that matter: its alignment, and whether it is NULL.
inline int64_t bits_of(const void *pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return static_cast<int64_t>(address % 16) | (pointer == nullptr ? 16 : 0);
}

inline int64_t pair_of(int32_t a, int32_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(a)) << 32 |
                              static_cast<uint32_t>(b));
}

inline PathKey key_of(const nf4_tensor &weight) {
  return {pair_of(weight.format, weight.blocksize),
          weight.nested_blocksize,
          weight.rows,
          weight.cols,
          bits_of(weight.packed),
          bits_of(weight.codebook),
          bits_of(weight.absmax)};
}
inline PathKey key_of(const nf4_int4_tensor &weight) {
  const int64_t order = bits_of(weight.g_idx) << 16 | bits_of(weight.permutation) << 8;
  return {pair_of(weight.layout, weight.scales_dtype) | int64_t{1} << 48,
          pair_of(weight.group_size, weight.zero_offset),
          weight.rows,
          weight.cols,
          bits_of(weight.packed),
          bits_of(weight.scales),
          bits_of(weight.zeros) | order};
}

template <class Kind>
PathKey key_of(const Product<Kind> &product, int32_t device) {
  PathKey key = key_of(product.weight);
  const nf4_matmul_args &args = product.args;
  const nf4_lora *const lora = args.lora;
  size_t i = 7;
  key[i++] = pair_of(device, args.dtype);
  key[i++] = args.m;
  key[i++] = bits_of(args.x) << 8 | bits_of(args.bias);
  key[i++] = args.x_stride;
  if (lora == nullptr) return key;
  key[i++] = pair_of(lora->dtype, lora->rank);
  key[i++] = lora->a_stride;
  key[i++] = lora->b_stride;
  key[i++] = bits_of(lora->a) << 8 | bits_of(lora->b);
  return key;
}

// Keeps the answers for the last keys, one for each value of a hash.
class KeptPaths {
 public:
  // `ask` returns an nf4_path, or 0 for an error, which is not kept.
  template <class Ask>
  nf4_path find(const PathKey &key, const Ask &ask) {
    uint64_t hash = 0;
    for (const int64_t each : key)
      hash = (hash ^ static_cast<uint64_t>(each)) * 0x9E3779B97F4A7C15u;
    Entry &entry = entries_[hash >> 57];
    if (entry.path == 0 || entry.key != key) entry = {key, ask()};
    return entry.path;
  }

 private:
  struct Entry {
    PathKey key{};
    nf4_path path = 0;
  };
  std::array<Entry, 128> entries_;  // 2^7, the number of values of the hash
};

}  // namespace nf4_torch

#endif
