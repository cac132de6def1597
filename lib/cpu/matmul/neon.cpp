// Matmul by NEON in fp32.
//
// Dot. 64 weights take 8 instructions to split their nibbles, 48 to look them up (isa/neon.hpp) and
// with each row of x 16 fma and loads, and 2 fma for the scales. Tile: 24 fma for 10 loads.
// docs/design/cpu.md counts the instructions.
#include "cpu/isa/neon.hpp"

#include "cpu/matmul/column_loops.hpp"
#include "cpu/matmul/loops.hpp"
#include "cpu/matmul/outer_loops.hpp"
#include "cpu/matmul/scattered_loops.hpp"
#include "nf4/nf4.h"

namespace nf4::cpu {
namespace {

// Of dense numbers.
struct Quads {
  using Item = float;
  using Operand = float32x4_t;
  using Sum = float32x4_t;
  static constexpr int kLanes = 4;
  static constexpr int kSumLanes = 4;
  static constexpr int kTileM = 6;
  static constexpr int kOuterVectors[] = {8, 8, 4, 4, 4, 4};

  static Sum zero() { return vdupq_n_f32(0); }
  static Operand load(const float *x) { return vld1q_f32(x); }
  static Operand load_some(const float *x, int64_t) { return load(x); }
  static Operand one() { return vdupq_n_f32(1); }
  static Operand broadcast(const float *x) { return vld1q_dup_f32(x); }
  static void store(float *to, Operand x) { vst1q_f32(to, x); }
  static Sum multiply_add(Operand a, Operand b, Sum sum) { return vfmaq_f32(sum, a, b); }
  static Sum scale_add(Sum a, Sum b, Sum sum) { return vfmaq_f32(sum, a, b); }
  static Sum broadcast_sum(float x) { return vdupq_n_f32(x); }
  static Sum load_sums(const float *sums) { return vld1q_f32(sums); }
  static void store_sums(float *to, Sum sums) { vst1q_f32(to, sums); }
  static float sum_of(Sum x) { return vaddvq_f32(x); }
  // The sums of four vectors to four floats.
  static void add_sums(Sum a, Sum b, Sum c, Sum d, float *to) {
    const Sum sums = vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
    vst1q_f32(to, vaddq_f32(vld1q_f32(to), sums));
  }
};

// Of rows of codes: 16 lanes, of which each two halves are added up.
struct Rows {
  using Item = float;
  using Operand = Floats16;
  struct Sum {
    float32x4_t low, high;
  };
  struct Codes {
    uint8x16_t by[4];
  };
  static constexpr int kLanes = 16;
  static constexpr int kSumLanes = 8;
  static constexpr int kVectors = 4;
  static constexpr int kUnit = kLanes * kVectors;
  static constexpr int kDotN[] = {1, 1, 1, 1};

  static Sum zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
  static Operand load(const float *x) { return load16(x); }
  static Operand one() { return Int4Lanes::broadcast_sum(1); }
  static void store(float *to, const Operand &x) { Int4Lanes::store_sums(to, x); }
  static Sum multiply(const Operand &a, const Operand &b) {
    return {vfmaq_f32(vmulq_f32(a.q[0], b.q[0]), a.q[1], b.q[1]),
            vfmaq_f32(vmulq_f32(a.q[2], b.q[2]), a.q[3], b.q[3])};
  }
  static Sum multiply_add(const Operand &a, const Operand &b, Sum sum) {
    return {vfmaq_f32(vfmaq_f32(sum.low, a.q[0], b.q[0]), a.q[1], b.q[1]),
            vfmaq_f32(vfmaq_f32(sum.high, a.q[2], b.q[2]), a.q[3], b.q[3])};
  }
  static Sum scale_add(Sum a, Sum b, Sum sum) {
    return {vfmaq_f32(sum.low, a.low, b.low), vfmaq_f32(sum.high, a.high, b.high)};
  }
  static Sum load_sums(const float *sums) { return {vld1q_f32(sums), vld1q_f32(sums + 4)}; }
  static void store_sums(float *to, Sum x) {
    vst1q_f32(to, x.low);
    vst1q_f32(to + 4, x.high);
  }
  static float sum_of(Sum x) { return vaddvq_f32(vaddq_f32(x.low, x.high)); }

  static FloatTable load_table(const void *codebook) {
    return FloatTable(load16(static_cast<const float *>(codebook)));
  }
  // The nibbles of words of 16 bits.
  static Codes load_codes(const uint8_t *packed) {
    const uint8x16x2_t bytes = vld2q_u8(packed);
    return {low_nibbles(bytes.val[0]), high_nibbles(bytes.val[0]), low_nibbles(bytes.val[1]),
            high_nibbles(bytes.val[1])};
  }
  static Floats16 look_up(const FloatTable &table, const Codes &codes) {
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

  // The place of the second half's scale among the unit's.
  static int load_spread(int scales) { return scales - 1; }
  static Sum spread_scales(const float *scales, int second) {
    return {vld1q_dup_f32(scales), vld1q_dup_f32(scales + second)};
  }
};

// Of units of one scale, whose lanes are added up to fewer registers.
struct RowsOfOneScale : Rows {
  using Sum = float32x4_t;
  static constexpr int kDotN[] = {2, 2, 1, 1};

  static Sum zero() { return vdupq_n_f32(0); }
  static Sum multiply(const Operand &a, const Operand &b) {
    return add_products(vmulq_f32(a.q[0], b.q[0]), a, b);
  }
  static Sum multiply_add(const Operand &a, const Operand &b, Sum sum) {
    return add_products(vfmaq_f32(sum, a.q[0], b.q[0]), a, b);
  }
  static Sum add_products(Sum first, const Operand &a, const Operand &b) {
    return vfmaq_f32(vfmaq_f32(vfmaq_f32(first, a.q[1], b.q[1]), a.q[2], b.q[2]), a.q[3], b.q[3]);
  }
  static Sum scale_add(Sum a, Sum b, Sum sum) { return vfmaq_f32(sum, a, b); }
  static Sum load_sums(const float *sums) {
    return vaddq_f32(vld1q_f32(sums), vld1q_f32(sums + 4));
  }
  static float sum_of(Sum x) { return vaddvq_f32(x); }
  static Sum spread_scales(const float *scales, int) { return vld1q_dup_f32(scales); }
};

template <bool kZeros>
void dot_rows(const DotArgs &args) {
  if (args.scales_per_unit == 1) return dot<RowsOfOneScale, kZeros>(args);
  dot<Rows, kZeros>(args);
}

// Of words of GPTQ and AWQ.
struct Columns : Int4Lanes {
  using Item = float;
  using Operand = Floats16;
  static constexpr int kLanes = 16;
  static constexpr int kColumnM = 4;
  static constexpr int kColumnRegisters = 5;  // of 16 floats

  static FloatTable load_table(const void *codebook) { return Rows::load_table(codebook); }
  static Floats16 look_up(const FloatTable &table, const Codes &codes) {
    return table.look_up(codes.by[0]);
  }
  static Codes next(const Codes &codes) { return shift_words(codes, 4); }
  static Floats16 broadcast(const float *x) { return broadcast_sum(*x); }
  static Floats16 multiply_add(const Floats16 &a, const Floats16 &b, const Floats16 &sum) {
    return scale_add(a, b, sum);
  }
};

template <class From, bool kHighFirst>
constexpr auto prepare = prepare_units<Rows, By16<From>, kHighFirst>;

}  // namespace

const MatmulKernels kNeonMatmul = {
    NF4_DTYPE_FP32,
    Rows::kUnit,
    Quads::kTileM,
    1024,
    4,
    8,
    Rows::kSumLanes,
    Columns::kSumLanes,
    {prepare<Fp32, true>, prepare<Fp16, true>, prepare<Bf16, true>},
    {prepare<Fp32, false>, prepare<Fp16, false>, prepare<Bf16, false>},
    dot_rows<false>,
    dot_rows<true>,
    x_sums<Rows>,
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

}  // namespace nf4::cpu
