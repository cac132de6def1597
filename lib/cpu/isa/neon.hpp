// Helpers that the NEON files share. They are in an unnamed namespace: each file may be compiled
// for instructions that not every machine has, so nothing of it may be linked elsewhere.
//
// tbl looks up bytes, so a table of 16 floats is four registers, one for each byte of the floats: 4
// tbl and 8 zip for 16 floats. Vectors of 16 floats are therefore four registers.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace nf4::cpu {
namespace {

// Element types, in vectors of 4 floats.
struct Fp32 {
  static constexpr int kBytes = 4;
  static float32x4_t load(const char *x) { return vld1q_f32((const float *)x); }
};

struct Fp16 {
  static constexpr int kBytes = 2;
  static constexpr int kInfinity = 0x7c00;
  static float32x4_t widen(uint16x4_t x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
  static float32x4_t load(const char *x) { return widen(vld1_u16((const uint16_t *)x)); }
};

struct Bf16 {
  static constexpr int kBytes = 2;
  static constexpr int kInfinity = 0x7f80;
  static float32x4_t widen(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
  static float32x4_t load(const char *x) { return widen(vld1_u16((const uint16_t *)x)); }
};

struct Floats16 {
  float32x4_t q[4];
};

// Element types, in vectors of 16 floats.
template <class From>
struct By16 {
  static constexpr int kBytes = From::kBytes;
  static Floats16 load(const char *x) {
    return {From::load(x), From::load(x + 4 * kBytes), From::load(x + 8 * kBytes),
            From::load(x + 12 * kBytes)};
  }
};

inline Floats16 load16(const float *x) { return By16<Fp32>::load((const char *)x); }

// Rounds floats to the nearest bf16, halves to even, with integer instructions. NaN inputs are
// canonical, so the rounding carry keeps them NaN.
inline uint16x8_t round_to_bf16(float32x4_t low, float32x4_t high) {
  const auto round = [](float32x4_t x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vreinterpretq_u16_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd));
  };
  return vuzp2q_u16(round(low), round(high));
}
inline uint16x8_t round_to_fp16(float32x4_t low, float32x4_t high) {
  return vcombine_u16(vreinterpret_u16_f16(vcvt_f16_f32(low)),
                      vreinterpret_u16_f16(vcvt_f16_f32(high)));
}

// Bytes 0 to 3 of 16 words.
struct Bytes4 {
  uint8x16_t by[4];

  static Bytes4 split(uint8x16_t a, uint8x16_t b, uint8x16_t c, uint8x16_t d) {
    const uint8x16_t even = vuzp1q_u8(a, b), next_even = vuzp1q_u8(c, d);
    const uint8x16_t odd = vuzp2q_u8(a, b), next_odd = vuzp2q_u8(c, d);
    return {vuzp1q_u8(even, next_even), vuzp1q_u8(odd, next_odd), vuzp2q_u8(even, next_even),
            vuzp2q_u8(odd, next_odd)};
  }
  static Bytes4 load(const uint32_t *words) {
    const auto *from = (const uint8_t *)words;
    return split(vld1q_u8(from), vld1q_u8(from + 16), vld1q_u8(from + 32), vld1q_u8(from + 48));
  }
  // Returns the words.
  Floats16 join() const {
    const uint16x8_t low = vreinterpretq_u16_u8(vzip1q_u8(by[0], by[1]));
    const uint16x8_t next_low = vreinterpretq_u16_u8(vzip2q_u8(by[0], by[1]));
    const uint16x8_t high = vreinterpretq_u16_u8(vzip1q_u8(by[2], by[3]));
    const uint16x8_t next_high = vreinterpretq_u16_u8(vzip2q_u8(by[2], by[3]));
    return {vreinterpretq_f32_u16(vzip1q_u16(low, high)),
            vreinterpretq_f32_u16(vzip2q_u16(low, high)),
            vreinterpretq_f32_u16(vzip1q_u16(next_low, next_high)),
            vreinterpretq_f32_u16(vzip2q_u16(next_low, next_high))};
  }
};

// 16 floats, indexed by code.
struct FloatTable {
  Bytes4 bytes;

  explicit FloatTable(const Floats16 &x)
      : bytes(Bytes4::split(vreinterpretq_u8_f32(x.q[0]), vreinterpretq_u8_f32(x.q[1]),
                            vreinterpretq_u8_f32(x.q[2]), vreinterpretq_u8_f32(x.q[3]))) {}
  explicit FloatTable(const void *floats)
      : FloatTable(load16(static_cast<const float *>(floats))) {}

  Floats16 look_up(uint8x16_t codes) const {
    return Bytes4{vqtbl1q_u8(bytes.by[0], codes), vqtbl1q_u8(bytes.by[1], codes),
                  vqtbl1q_u8(bytes.by[2], codes), vqtbl1q_u8(bytes.by[3], codes)}
        .join();
  }
};

// 16 numbers of bf16, indexed by code. As they are the upper halves of floats, 16 floats take 2
// tbl, 2 zip and 4 shll.
struct Bf16Table {
  uint8x16_t low, high;

  explicit Bf16Table(const void *numbers) {
    const uint8x16x2_t bytes = vld2q_u8(static_cast<const uint8_t *>(numbers));
    low = bytes.val[0];
    high = bytes.val[1];
  }

  Floats16 look_up(uint8x16_t codes) const {
    const uint8x16_t low_bytes = vqtbl1q_u8(low, codes), high_bytes = vqtbl1q_u8(high, codes);
    const uint16x8_t first = vreinterpretq_u16_u8(vzip1q_u8(low_bytes, high_bytes));
    const uint16x8_t second = vreinterpretq_u16_u8(vzip2q_u8(low_bytes, high_bytes));
    return {Bf16::widen(vget_low_u16(first)), Bf16::widen(vget_high_u16(first)),
            Bf16::widen(vget_low_u16(second)), Bf16::widen(vget_high_u16(second))};
  }
};

inline uint8x16_t low_nibbles(uint8x16_t x) { return vandq_u8(x, vdupq_n_u8(15)); }
inline uint8x16_t high_nibbles(uint8x16_t x) { return vshrq_n_u8(x, 4); }

// Integer weights: words, zeros and scales of 16 rows.
struct Int4Lanes {
  using Sum = Floats16;
  // The nibbles of 16 words, low nibbles first.
  struct Codes {
    uint8x16_t by[8];
  };
  static constexpr int kSumLanes = 16;

  static Floats16 zero() { return broadcast_sum(0); }
  static Floats16 load_sums(const float *sums) { return load16(sums); }
  static void store_sums(float *to, const Floats16 &x) {
    vst1q_f32(to, x.q[0]);
    vst1q_f32(to + 4, x.q[1]);
    vst1q_f32(to + 8, x.q[2]);
    vst1q_f32(to + 12, x.q[3]);
  }
  static Floats16 broadcast_sum(float x) {
    const float32x4_t all = vdupq_n_f32(x);
    return {all, all, all, all};
  }
  static Floats16 scale_add(const Floats16 &a, const Floats16 &b, const Floats16 &sum) {
    return {vfmaq_f32(sum.q[0], a.q[0], b.q[0]), vfmaq_f32(sum.q[1], a.q[1], b.q[1]),
            vfmaq_f32(sum.q[2], a.q[2], b.q[2]), vfmaq_f32(sum.q[3], a.q[3], b.q[3])};
  }

  // These are for words of GPTQ and AWQ. Loads the first `lanes` words; the other lanes are zero.
  static Codes load_words(const uint32_t *words, int64_t lanes) {
    if (lanes >= kSumLanes) return nibbles_of(Bytes4::load(words));
    uint32_t padded[kSumLanes] = {};
    for (int i = 0; i < lanes; ++i) padded[i] = words[i];
    return nibbles_of(Bytes4::load(padded));
  }
  static Codes nibbles_of(const Bytes4 &x) {
    return {low_nibbles(x.by[0]),  high_nibbles(x.by[0]), low_nibbles(x.by[1]),
            high_nibbles(x.by[1]), low_nibbles(x.by[2]),  high_nibbles(x.by[2]),
            low_nibbles(x.by[3]),  high_nibbles(x.by[3])};
  }
  // Shifts by a multiple of 4.
  static Codes shift_words(const Codes &words, int bits) {
    const uint8x16_t *by = words.by;
    const int first = bits / 4;
    return {by[first],           by[(first + 1) % 8], by[(first + 2) % 8], by[(first + 3) % 8],
            by[(first + 4) % 8], by[(first + 5) % 8], by[(first + 6) % 8], by[(first + 7) % 8]};
  }
  // Returns 8 minus the zero point in the low bits.
  static Floats16 zero_terms(const Codes &words) {
    const int8x16_t terms = vsubq_s8(vdupq_n_s8(8), vreinterpretq_s8_u8(words.by[0]));
    const int16x8_t low = vmovl_s8(vget_low_s8(terms)), high = vmovl_high_s8(terms);
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
  }
  // Moves the zeros of `rows` rows, in whole words of GPTQ or AWQ that are stored less `offset`, to
  // the low bits of one lane each.
  static Codes spread_zeros(const uint32_t *words, int64_t rows, uint32_t offset, bool awq) {
    const uint32x2_t both = {words[0] + offset, rows > 8 ? words[1] + offset : 0};
    const uint8x16_t bytes = vreinterpretq_u8_u32(vcombine_u32(both, both));
    const uint8x16_t in_words = vzip1q_u8(low_nibbles(bytes), high_nibbles(bytes));
    constexpr uint8_t kAwq[] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};
    return {awq ? vqtbl1q_u8(in_words, vld1q_u8(kAwq)) : in_words};
  }
  // Turns a NaN into the one whose mantissa has only the highest bit set.
  static float32x4_t canonical(float32x4_t x) {
    return vbslq_f32(vceqq_f32(x, x), x, vreinterpretq_f32_u32(vdupq_n_u32(0x7fc00000)));
  }
  static Floats16 canonical(const Floats16 &x) {
    return {canonical(x.q[0]), canonical(x.q[1]), canonical(x.q[2]), canonical(x.q[3])};
  }
  static Floats16 load_scales(const uint16_t *scales, bool fp16, int64_t rows) {
    uint16_t padded[kSumLanes] = {};
    if (rows < kSumLanes) {
      for (int i = 0; i < rows; ++i) padded[i] = scales[i];
      scales = padded;
    }
    return widen(vld1q_u16(scales), vld1q_u16(scales + 8), fp16);
  }
  static Floats16 widen(uint16x8_t low, uint16x8_t high, bool fp16) {
    return fp16 ? widen<Fp16>(low, high) : widen<Bf16>(low, high);
  }
  template <class T>
  static Floats16 widen(uint16x8_t low, uint16x8_t high) {
    return {T::widen(vget_low_u16(low)), T::widen(vget_high_u16(low)), T::widen(vget_low_u16(high)),
            T::widen(vget_high_u16(high))};
  }
};

// For matmul: sums in fp32, in four lanes.
struct QuadSums {
  using Sum = float32x4_t;
  static constexpr int kSumLanes = 4;

  static Sum zero() { return vdupq_n_f32(0); }
  static Sum load_sums(const float *sums) { return vld1q_f32(sums); }
  static void store_sums(float *to, Sum sums) { vst1q_f32(to, sums); }
  static Sum broadcast_sum(float x) { return vdupq_n_f32(x); }
  static Sum scale_add(Sum a, Sum b, Sum sum) { return vfmaq_f32(sum, a, b); }
  static float sum_of(Sum x) { return vaddvq_f32(x); }
  // Reduces four vectors to four floats.
  static void add_sums(Sum a, Sum b, Sum c, Sum d, float *to) {
    const Sum sums = vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
    vst1q_f32(to, vaddq_f32(vld1q_f32(to), sums));
  }
};

// The sums of a unit of rows of codes, from four registers of products. With one scale, all of them
// are summed in four lanes, which leaves registers for more rows of x. Otherwise there is a scale
// for each half.
struct OneScale : QuadSums {
  static constexpr int kSumLanes = 8;  // the same as with two scales

  static Sum load_sums(const float *sums) {
    return vaddq_f32(vld1q_f32(sums), vld1q_f32(sums + 4));
  }
  static int load_spread(int) { return 0; }
  static Sum spread_scales(const float *scales, int) { return vld1q_dup_f32(scales); }
  template <class Operand, class Add>
  static Sum add_products(const Operand &a, const Operand &b, Sum sum, Add add) {
    sum = add(add(sum, a.q[0], b.q[0]), a.q[1], b.q[1]);
    return add(add(sum, a.q[2], b.q[2]), a.q[3], b.q[3]);
  }
};
struct TwoScales {
  struct Sum {
    float32x4_t low, high;
  };
  static constexpr int kSumLanes = 8;

  static Sum zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
  static Sum load_sums(const float *sums) { return {vld1q_f32(sums), vld1q_f32(sums + 4)}; }
  static void store_sums(float *to, Sum x) {
    vst1q_f32(to, x.low);
    vst1q_f32(to + 4, x.high);
  }
  static Sum scale_add(Sum a, Sum b, Sum sum) {
    return {vfmaq_f32(sum.low, a.low, b.low), vfmaq_f32(sum.high, a.high, b.high)};
  }
  static float sum_of(Sum x) { return vaddvq_f32(vaddq_f32(x.low, x.high)); }
  static int load_spread(int) { return 0; }
  static Sum spread_scales(const float *scales, int) {
    return {vld1q_dup_f32(scales), vld1q_dup_f32(scales + 1)};
  }
  template <class Operand, class Add>
  static Sum add_products(const Operand &a, const Operand &b, Sum sum, Add add) {
    return {add(add(sum.low, a.q[0], b.q[0]), a.q[1], b.q[1]),
            add(add(sum.high, a.q[2], b.q[2]), a.q[3], b.q[3])};
  }
};

}  // namespace
}  // namespace nf4::cpu
