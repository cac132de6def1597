// Matmul with NEON in fp32.
//
// Dot: 64 weights take 6 instructions for their nibbles and 48 to look them up (isa/neon.hpp), or
// 32 with a codebook in bf16, plus 16 fma, their loads, and one more fma for the scale for each row
// of x. Columns: 12 of the look-ups for 16 weights, plus 4 fma for each row of x. Tile: 24 fma for
// 10 loads. docs/design/cpu.md counts the instructions.
#include "cpu/isa/neon.hpp"

#include <climits>
#include <type_traits>

#include "cpu/matmul/column_loops.hpp"
#include "cpu/matmul/loops.hpp"
#include "cpu/matmul/outer_loops.hpp"
#include "cpu/matmul/scattered_loops.hpp"
#include "nf4/nf4.h"

namespace nf4::cpu {
namespace {

// Operands of dense numbers.
struct Quads : QuadSums {
  using Item = float;
  using Operand = float32x4_t;
  static constexpr int kLanes = 4;
  static constexpr int kTileM = 6;
  static constexpr int kOuterVectors[] = {8, 8, 4, 4, 4, 4};

  static Operand load(const float *x) { return vld1q_f32(x); }
  static Operand load_some(const float *x, int64_t) { return load(x); }
  static Operand one() { return vdupq_n_f32(1); }
  static Operand broadcast(const float *x) { return vld1q_dup_f32(x); }
  static void store(float *to, Operand x) { vst1q_f32(to, x); }
  static Sum multiply_add(Operand a, Operand b, Sum sum) { return vfmaq_f32(sum, a, b); }
};

// Operands of rows of codes, with a codebook in fp32 or bf16.
template <class Sums, class Table>
struct Rows : Sums {
  using Item = float;
  using Operand = Floats16;
  using typename Sums::Sum;
  using Order = ByWords<Rows>;
  struct Codes {
    uint8x16_t by[4];
  };
  static constexpr int kLanes = 16;
  static constexpr int kVectors = 4;
  static constexpr int kUnit = kLanes * kVectors;
  static constexpr int kDotN[] = {2, 2, 1, 1};

  static Operand load(const float *x) { return load16(x); }
  static Operand one() { return Int4Lanes::broadcast_sum(1); }
  static void store(float *to, const Operand &x) { Int4Lanes::store_sums(to, x); }
  static Sum multiply(const Operand &a, const Operand &b) {
    return multiply_add(a, b, Sums::zero());
  }
  static Sum multiply_add(const Operand &a, const Operand &b, Sum sum) {
    return Sums::add_products(a, b, sum, [](float32x4_t to, float32x4_t c, float32x4_t d) {
      return vfmaq_f32(to, c, d);
    });
  }

  static Table load_table(const void *codebook) { return Table(codebook); }
  // The nibbles of 16-bit words.
  static Codes load_codes(const uint8_t *packed) {
    const uint8x16x2_t bytes = vld2q_u8(packed);
    return {low_nibbles(bytes.val[0]), high_nibbles(bytes.val[0]), low_nibbles(bytes.val[1]),
            high_nibbles(bytes.val[1])};
  }
  static Operand look_up(const Table &table, const Codes &codes) {
    return table.look_up(codes.by[0]);
  }
  static Codes next(const Codes &codes) {
    return {codes.by[1], codes.by[2], codes.by[3], codes.by[0]};
  }
  static void split_even_odd(const Operand &a, const Operand &b, Operand &even, Operand &odd) {
    even = {vuzp1q_f32(a.q[0], a.q[1]), vuzp1q_f32(a.q[2], a.q[3]), vuzp1q_f32(b.q[0], b.q[1]),
            vuzp1q_f32(b.q[2], b.q[3])};
    odd = {vuzp2q_f32(a.q[0], a.q[1]), vuzp2q_f32(a.q[2], a.q[3]), vuzp2q_f32(b.q[0], b.q[1]),
           vuzp2q_f32(b.q[2], b.q[3])};
  }
};

template <class Table, bool kZeros>
void dot_rows(const DotArgs &args) {
  if (args.scales_per_unit == 1) return dot<Rows<OneScale, Table>, kZeros>(args);
  dot<Rows<TwoScales, Table>, kZeros>(args);
}

// Operands of GPTQ words, and of AWQ words in blocks.
struct Columns : Int4Lanes {
  using Item = float;
  using Operand = Floats16;
  static constexpr int kLanes = 16;
  static constexpr int kColumnM = 4;
  // Registers of 16 floats; with more, two rows of x spill.
  static constexpr int kColumnRegisters = 5;

  static FloatTable load_table(const void *codebook) { return FloatTable(codebook); }
  static Operand look_up(const FloatTable &table, const Codes &codes) {
    return table.look_up(codes.by[0]);
  }
  static Codes next(const Codes &codes) { return shift_words(codes, 4); }
  static Operand broadcast(const float *x) { return broadcast_sum(*x); }
  static Sum multiply_add(const Operand &a, const Operand &b, const Sum &sum) {
    return scale_add(a, b, sum);
  }
};

// Rows whose units of x and sums of x are those of all others.
using AnyRows = Rows<TwoScales, FloatTable>;

template <class From, bool kHighFirst>
constexpr auto prepare = prepare_units<AnyRows, By16<From>, kHighFirst>;

template <class Table, bool kHighFirst>
constexpr DotKernels kDot = {
    std::is_same_v<Table, Bf16Table> ? NF4_DTYPE_BF16 : NF4_DTYPE_FP32,
    {prepare<Fp32, kHighFirst>, prepare<Fp16, kHighFirst>, prepare<Bf16, kHighFirst>},
    dot_rows<Table, false>,
    kHighFirst ? nullptr : dot_rows<Table, true>};

// The kernels for one dtype of x differ in the codebook of dot alone. The integers of int4 are
// exact in bf16.
template <class Table>
constexpr MatmulKernels kernels() {
  return {
      NF4_DTYPE_FP32,
      AnyRows::kUnit,
      Quads::kTileM,
      1024,
      4,
      INT_MAX,
      TwoScales::kSumLanes,
      Columns::kSumLanes,
      kDot<Table, true>,
      kDot<Bf16Table, false>,
      x_sums<AnyRows>,
      nullptr,
      column_sums<Quads>,
      gptq_columns<Columns>,
      nullptr,
      block_columns<Columns>,
      scattered_columns<Columns>,
      {nullptr, convert<Quads, Fp16>, convert<Quads, Bf16>},
      tile<Quads>,
      outer<Quads>,
      nullptr,
  };
}

}  // namespace

const MatmulKernels kNeonMatmul = kernels<FloatTable>();
const MatmulKernels kNeonMatmulOfBf16 = kernels<Bf16Table>();

}  // namespace nf4::cpu
