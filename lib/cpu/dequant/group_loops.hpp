// Reads scales and zeros of integer weights, for vectors of any instruction set. T is a type of an
// unnamed namespace (matmul/loops.hpp says why).
#pragma once

#include <cstdint>

#include "cpu/dequant/kernels.hpp"
#include "nf4/nf4.h"

namespace nf4::cpu {

template <class T>
void read_groups(const GroupsArgs &args) {
  for (int64_t i = 0; i < args.count; i += T::kSumLanes) {
    const int64_t left = args.count - i;
    T::store_sums(args.scales_out + i,
                  T::canonical(T::load_scales(args.scales + i, args.fp16, left)));
    auto zeros = T::zero();
    if (args.zeros != nullptr)
      zeros = T::zero_terms(args.layout == NF4_INT4_COMPRESSED_TENSORS
                                ? T::shift_words(T::load_words(args.zeros + i, left), args.shift)
                                : T::spread_zeros(args.zeros + i / 8, left, args.zero_offset,
                                                  args.layout == NF4_INT4_AWQ));
    T::store_sums(args.zeros_out + i, zeros);
  }
}

}  // namespace nf4::cpu
