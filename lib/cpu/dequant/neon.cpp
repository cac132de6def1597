// Dequantize with NEON.
//
// The 16 values of a block are multiplied and rounded once, into two tables of bytes, low and high,
// for tbl: 12 instructions and 4 stores for 32 weights of 16 bits. fp32 has four tables, and takes
// 28 instructions and 8 stores.
#include "cpu/isa/neon.hpp"

#include "cpu/dequant/block_loops.hpp"
#include "cpu/dequant/group_loops.hpp"
#include "cpu/dequant/kernels.hpp"
#include "cpu/dequant/word_loops.hpp"

namespace nf4::cpu {
namespace {

uint16x8_t round(Fp16, float32x4_t low, float32x4_t high) { return round_to_fp16(low, high); }
uint16x8_t round(Bf16, float32x4_t low, float32x4_t high) { return round_to_bf16(low, high); }

// 32 codes in order.
struct Codes32 {
  uint8x16_t first, second;
};
template <class Kind>
Codes32 load_codes(const uint8_t *packed) {
  const uint8x16_t bytes = vld1q_u8(packed);
  const uint8x16_t low = low_nibbles(bytes), high = high_nibbles(bytes);
  if (Kind::kHighFirst) return {vzip1q_u8(high, low), vzip2q_u8(high, low)};
  return {vzip1q_u8(low, high), vzip2q_u8(low, high)};
}

template <class T>
struct WordTable {
  static constexpr int kBytes = 2;
  uint8x16_t low_bytes, high_bytes;

  // NaN products are canonical, so rounding keeps them NaN (DequantArgs).
  explicit WordTable(const Floats16 &products) {
    const uint8x16_t low = vreinterpretq_u8_u16(round(T{}, products.q[0], products.q[1]));
    const uint8x16_t high = vreinterpretq_u8_u16(round(T{}, products.q[2], products.q[3]));
    low_bytes = vuzp1q_u8(low, high);
    high_bytes = vuzp2q_u8(low, high);
  }

  template <class Kind>
  void decode(const uint8_t *packed, char *out) const {
    const Codes32 codes = load_codes<Kind>(packed);
    decode16(codes.first, (uint8_t *)out);
    decode16(codes.second, (uint8_t *)out + 32);
  }

  void decode16(uint8x16_t codes, uint8_t *out) const {
    const uint8x16_t low = vqtbl1q_u8(low_bytes, codes), high = vqtbl1q_u8(high_bytes, codes);
    vst1q_u8(out, vzip1q_u8(low, high));
    vst1q_u8(out + 16, vzip2q_u8(low, high));
  }
};

struct Fp32Table {
  static constexpr int kBytes = 4;
  FloatTable values;

  explicit Fp32Table(const Floats16 &products) : values(products) {}

  template <class Kind>
  void decode(const uint8_t *packed, char *out) const {
    const Codes32 codes = load_codes<Kind>(packed);
    Int4Lanes::store_sums((float *)out, values.look_up(codes.first));
    Int4Lanes::store_sums((float *)out + 16, values.look_up(codes.second));
  }
};

// The kind of weight that a kernel is compiled for: which nibble of a byte comes first, and how the
// 16 values of a block are computed.
struct Floats4 {
  static constexpr bool kHighFirst = true;
  static Floats16 values(const DequantArgs &args, int64_t block) {
    const Floats16 codes = load16(args.codebook);
    const float32x4_t scale = vdupq_n_f32(args.scales[block]);
    return {vmulq_f32(codes.q[0], scale), vmulq_f32(codes.q[1], scale),
            vmulq_f32(codes.q[2], scale), vmulq_f32(codes.q[3], scale)};
  }
};
struct Integers4 {
  static constexpr bool kHighFirst = false;
  static Floats16 values(const DequantArgs &args, int64_t group) {
    const Floats16 codes = load16(args.codebook);
    const float32x4_t scale = vdupq_n_f32(args.scales[group]);
    const float32x4_t zero = vdupq_n_f32(args.zeros[group]);
    return {vmulq_f32(vaddq_f32(codes.q[0], zero), scale),
            vmulq_f32(vaddq_f32(codes.q[1], zero), scale),
            vmulq_f32(vaddq_f32(codes.q[2], zero), scale),
            vmulq_f32(vaddq_f32(codes.q[3], zero), scale)};
  }
};

// Vectors of 4 words.
struct Words {
  using Vector = uint32x4_t;
  static constexpr int kLanes = 4;

  // Loads the first `lanes` words; the other lanes are zero.
  static Vector load(const uint32_t *words, int64_t lanes) {
    if (lanes >= kLanes) return vld1q_u32(words);
    uint32_t padded[kLanes] = {};
    for (int i = 0; i < lanes; ++i) padded[i] = words[i];
    return vld1q_u32(padded);
  }
  static Vector set(int x) { return vdupq_n_u32(static_cast<uint32_t>(x)); }
  // Rotates to the left by less than 32 bits.
  static Vector rotate(Vector x, Vector bits) {
    const int32x4_t left = vreinterpretq_s32_u32(bits);
    return vorrq_u32(vshlq_u32(x, left), vshlq_u32(x, vsubq_s32(left, vdupq_n_s32(32))));
  }
  static void store(uint8_t *to, Vector x) { vst1q_u8(to, vreinterpretq_u8_u32(x)); }
  // Word c of vector j becomes word 8 c + j of all words.
  static void interleave(Vector (&x)[8]) {
    Vector first[] = {x[0], x[1], x[2], x[3]}, second[] = {x[4], x[5], x[6], x[7]};
    transpose(first);
    transpose(second);
    NF4_UNROLL
    for (int c = 0; c < 4; ++c) {
      x[2 * c] = first[c];
      x[2 * c + 1] = second[c];
    }
  }
  // The inverse of interleave().
  static void deinterleave(Vector (&x)[8]) {
    Vector first[] = {x[0], x[2], x[4], x[6]}, second[] = {x[1], x[3], x[5], x[7]};
    transpose(first);
    transpose(second);
    NF4_UNROLL
    for (int c = 0; c < 4; ++c) {
      x[c] = first[c];
      x[c + 4] = second[c];
    }
  }
  static void transpose(Vector (&x)[kLanes]) {
    const uint64x2_t a = vreinterpretq_u64_u32(vtrn1q_u32(x[0], x[1]));
    const uint64x2_t b = vreinterpretq_u64_u32(vtrn2q_u32(x[0], x[1]));
    const uint64x2_t c = vreinterpretq_u64_u32(vtrn1q_u32(x[2], x[3]));
    const uint64x2_t d = vreinterpretq_u64_u32(vtrn2q_u32(x[2], x[3]));
    x[0] = vreinterpretq_u32_u64(vtrn1q_u64(a, c));
    x[1] = vreinterpretq_u32_u64(vtrn1q_u64(b, d));
    x[2] = vreinterpretq_u32_u64(vtrn2q_u64(a, c));
    x[3] = vreinterpretq_u32_u64(vtrn2q_u64(b, d));
  }
};

}  // namespace

const DequantKernels kNeonDequant = {
    {dequant<Floats4, Fp32Table>, dequant<Floats4, WordTable<Fp16>>,
     dequant<Floats4, WordTable<Bf16>>},
    {dequant<Integers4, Fp32Table>, dequant<Integers4, WordTable<Fp16>>,
     dequant<Integers4, WordTable<Bf16>>},
    read_groups<Int4Lanes>,
    gptq_words<Words>,
    awq_words<Words>,
    awq_from_gptq<Words>,
    gptq_rows<Words>,
    awq_rows<Words>,
    nullptr,
};

}  // namespace nf4::cpu
