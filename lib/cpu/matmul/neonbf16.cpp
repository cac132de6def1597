// Matmul of bf16 with bfdot, which adds the products of pairs to a sum in fp32; it rounds in its
// own way and flushes subnormal numbers. Dot takes the codebook in bf16 from core/formats.hpp.
//
// Dot: 64 weights take 6 instructions for their nibbles and 16 to look them up in two tables of
// bytes, plus 8 bfdot and their loads for each row of x. Columns: 12 for 32 weights, pairs of
// columns, plus 4 bfdot for each row of x. Tile: 24 bfdot for 10 loads. docs/design/cpu.md counts
// the instructions.
#include <climits>

#include "cpu/isa/neon.hpp"
#include "cpu/matmul/column_loops.hpp"
#include "cpu/matmul/loops.hpp"
#include "cpu/matmul/outer_loops.hpp"
#include "cpu/matmul/scattered_loops.hpp"
#include "nf4/nf4.h"

namespace nf4::cpu {
namespace {

float32x4_t add_pairs(float32x4_t sum, uint16x8_t a, uint16x8_t b) {
  return vbfdotq_f32(sum, vreinterpretq_bf16_u16(a), vreinterpretq_bf16_u16(b));
}

// Operands of dense numbers.
struct Quads : QuadSums {
  using Item = uint16_t;
  using Operand = uint16x8_t;
  static constexpr int kLanes = 8;
  static constexpr int kTileM = 6;
  static constexpr int kOuterVectors[] = {8, 8, 4, 4, 4, 4};

  static Operand load(const uint16_t *x) { return vld1q_u16(x); }
  static Operand load_some(const uint16_t *x, int64_t) { return load(x); }
  static Operand one() {
    uint16x8_t ones = vdupq_n_u16(0x3f80);
    asm("" : "+w"(ones));  // otherwise GCC 12 takes it for bf16's 1 and makes fp16's
    return ones;
  }
  // Broadcasts a pair.
  static Operand broadcast(const uint16_t *x) {
    return vreinterpretq_u16_u32(vld1q_dup_u32((const uint32_t *)x));
  }
  static void store(uint16_t *to, Operand x) { vst1q_u16(to, x); }
  static Sum multiply_add(Operand a, Operand b, Sum sum) { return add_pairs(sum, a, b); }
  // Reorders to 0 4 1 5 2 6 3 7, as look_up() of columns finds the codes of a word.
  static Operand pair(Operand x) { return vzip1q_u16(x, vextq_u16(x, x, 4)); }
};

// 32 numbers.
struct Numbers32 {
  uint16x8_t q[4];
};

// Operands of rows of codes.
template <class Sums>
struct Rows : Sums {
  using Item = uint16_t;
  using Operand = Numbers32;
  using typename Sums::Sum;
  using Order = ByWords<Rows>;
  // The low nibbles of 32 bytes, and the high ones.
  struct Codes {
    uint8x16_t by[4];
  };
  static constexpr int kLanes = 32;
  static constexpr int kVectors = 2;
  static constexpr int kUnit = kLanes * kVectors;
  static constexpr int kDotN[] = {4, 2, 2, 2};

  static Operand load(const uint16_t *x) {
    return {vld1q_u16(x), vld1q_u16(x + 8), vld1q_u16(x + 16), vld1q_u16(x + 24)};
  }
  static Operand one() {
    const uint16x8_t all = Quads::one();
    return {all, all, all, all};
  }
  static void store(uint16_t *to, const Operand &x) {
    vst1q_u16(to, x.q[0]);
    vst1q_u16(to + 8, x.q[1]);
    vst1q_u16(to + 16, x.q[2]);
    vst1q_u16(to + 24, x.q[3]);
  }
  static Sum multiply(const Operand &a, const Operand &b) {
    return multiply_add(a, b, Sums::zero());
  }
  static Sum multiply_add(const Operand &a, const Operand &b, Sum sum) {
    return Sums::add_products(a, b, sum, add_pairs);
  }

  static Bf16Table load_table(const void *codebook) { return Bf16Table(codebook); }
  static Codes load_codes(const uint8_t *packed) {
    const uint8x16_t first = vld1q_u8(packed), second = vld1q_u8(packed + 16);
    return {low_nibbles(first), low_nibbles(second), high_nibbles(first), high_nibbles(second)};
  }
  static Operand look_up(const Bf16Table &table, const Codes &codes) {
    const uint8x16_t low = vqtbl1q_u8(table.low, codes.by[0]);
    const uint8x16_t high = vqtbl1q_u8(table.high, codes.by[0]);
    const uint8x16_t next_low = vqtbl1q_u8(table.low, codes.by[1]);
    const uint8x16_t next_high = vqtbl1q_u8(table.high, codes.by[1]);
    return {vreinterpretq_u16_u8(vzip1q_u8(low, high)), vreinterpretq_u16_u8(vzip2q_u8(low, high)),
            vreinterpretq_u16_u8(vzip1q_u8(next_low, next_high)),
            vreinterpretq_u16_u8(vzip2q_u8(next_low, next_high))};
  }
  static Codes next(const Codes &codes) {
    return {codes.by[2], codes.by[3], codes.by[0], codes.by[1]};
  }
  static void split_even_odd(const Operand &a, const Operand &b, Operand &even, Operand &odd) {
    even = {vuzp1q_u16(a.q[0], a.q[1]), vuzp1q_u16(a.q[2], a.q[3]), vuzp1q_u16(b.q[0], b.q[1]),
            vuzp1q_u16(b.q[2], b.q[3])};
    odd = {vuzp2q_u16(a.q[0], a.q[1]), vuzp2q_u16(a.q[2], a.q[3]), vuzp2q_u16(b.q[0], b.q[1]),
           vuzp2q_u16(b.q[2], b.q[3])};
  }
};

template <bool kZeros>
void dot_rows(const DotArgs &args) {
  if (args.scales_per_unit == 1) return dot<Rows<OneScale>, kZeros>(args);
  dot<Rows<TwoScales>, kZeros>(args);
}

// Operands of GPTQ words, and of AWQ words in blocks: a pair of columns per lane.
struct Columns : Int4Lanes {
  using Item = uint16_t;
  using Operand = Numbers32;
  static constexpr int kLanes = 32;
  static constexpr int kColumnM = 4;
  static constexpr int kColumnRegisters = 5;  // registers of 16 floats

  static Bf16Table load_table(const void *codebook) { return Bf16Table(codebook); }
  // Looks up the codes i and i + 4 of a word.
  static Operand look_up(const Bf16Table &table, const Codes &codes) {
    const Floats16 words =
        Bytes4{vqtbl1q_u8(table.low, codes.by[0]), vqtbl1q_u8(table.high, codes.by[0]),
               vqtbl1q_u8(table.low, codes.by[4]), vqtbl1q_u8(table.high, codes.by[4])}
            .join();
    return {vreinterpretq_u16_f32(words.q[0]), vreinterpretq_u16_f32(words.q[1]),
            vreinterpretq_u16_f32(words.q[2]), vreinterpretq_u16_f32(words.q[3])};
  }
  static Codes next(const Codes &codes) { return shift_words(codes, 4); }
  static Operand broadcast(const uint16_t *x) {
    const uint16x8_t all = Quads::broadcast(x);
    return {all, all, all, all};
  }
  static Sum multiply_add(const Operand &a, const Operand &b, const Sum &sum) {
    return {add_pairs(sum.q[0], a.q[0], b.q[0]), add_pairs(sum.q[1], a.q[1], b.q[1]),
            add_pairs(sum.q[2], a.q[2], b.q[2]), add_pairs(sum.q[3], a.q[3], b.q[3])};
  }
};

void pair_rows(const void *a, const void *b, int64_t elements, void *out) {
  const auto *row = static_cast<const uint16_t *>(a), *next = static_cast<const uint16_t *>(b);
  auto *to = static_cast<uint16_t *>(out);
  for (int64_t i = 0; i < elements; i += 8, to += 16) {
    const uint16x8_t x = vld1q_u16(row + i), y = vld1q_u16(next + i);
    vst1q_u16(to, vzip1q_u16(x, y));
    vst1q_u16(to + 8, vzip2q_u16(x, y));
  }
}

struct Words {
  static constexpr int kBytes = 2;
  static Numbers32 load(const char *x) { return Rows<TwoScales>::load((const uint16_t *)x); }
};

}  // namespace

const MatmulKernels kNeonBf16Matmul = {
    NF4_DTYPE_BF16,
    Rows<TwoScales>::kUnit,
    Quads::kTileM,
    4096,
    8,
    INT_MAX,
    TwoScales::kSumLanes,
    Columns::kSumLanes,
    {NF4_DTYPE_BF16,
     {nullptr, nullptr, prepare_units<Rows<TwoScales>, Words>},
     dot_rows<false>,
     nullptr},
    {NF4_DTYPE_BF16,
     {nullptr, nullptr, prepare_units<Rows<TwoScales>, Words, false>},
     dot_rows<false>,
     dot_rows<true>},
    x_sums<Rows<TwoScales>>,
    pair_columns<Quads>,
    column_sums<Quads>,
    gptq_columns<Columns>,
    nullptr,
    block_columns<Columns>,
    scattered_columns<Columns>,
    {nullptr, nullptr, nullptr},
    tile<Quads>,
    outer<Quads>,
    pair_rows,
};

}  // namespace nf4::cpu
