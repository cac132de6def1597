// Quantize with NEON.
//
// A weight takes 0.4 instructions for the scale (fp32 0.75) and about 3 for the code: multiply,
// find the cell, look up its threshold in four tables of bytes, compare, look up both codes,
// choose. If thresholds are too close for cells, there are 15 comparisons. Blocks that are not
// finite take 2 more.
#include "cpu/isa/neon.hpp"

#include "cpu/quantize/int4_loops.hpp"
#include "cpu/quantize/kernels.hpp"
#include "cpu/quantize/scale_loops.hpp"

namespace nf4::cpu {
namespace {

// The largest magnitude of a block; with kFinite, the largest finite one. Taken as integers,
// magnitudes keep their order, and numbers that are not finite come after those that are.
template <class T, bool kFinite>
struct Largest {
  static float of(const char *in, int64_t elements) {
    uint16x8_t largest = vdupq_n_u16(0);
    for (int64_t i = 0; i < elements; i += 8) {
      uint16x8_t x = vbicq_u16(vld1q_u16((const uint16_t *)in + i), vdupq_n_u16(0x8000));
      if (kFinite) x = vandq_u16(x, vcltq_u16(x, vdupq_n_u16(T::kInfinity)));
      largest = vmaxq_u16(largest, x);
    }
    return vgetq_lane_f32(T::widen(vdup_n_u16(vmaxvq_u16(largest))), 0);
  }
};
template <bool kFinite>
struct Largest<Fp32, kFinite> {
  static float of(const char *in, int64_t elements) {
    uint32x4_t largest = vdupq_n_u32(0);
    for (int64_t i = 0; i < elements; i += 4) {
      uint32x4_t x = vbicq_u32(vld1q_u32((const uint32_t *)in + i), vdupq_n_u32(0x80000000));
      if (kFinite) x = vandq_u32(x, vcltq_u32(x, vdupq_n_u32(0x7f800000)));
      largest = vmaxq_u32(largest, x);
    }
    return vgetq_lane_f32(vreinterpretq_f32_u32(vdupq_n_u32(vmaxvq_u32(largest))), 0);
  }
};

// x times inverse. With kFinite x is finite. Otherwise NaN becomes 0, and infinities become 1 and
// -1.
template <bool kFinite>
float32x4_t normalise(float32x4_t x, float32x4_t inverse) {
  const float32x4_t product = vmulq_f32(x, inverse);
  if (kFinite) return product;
  const float32x4_t signed_one = vbslq_f32(vdupq_n_u32(0x80000000), x, vdupq_n_f32(1));
  const uint32x4_t end = vandq_u32(vceqq_f32(x, x), vreinterpretq_u32_f32(signed_one));
  const uint32x4_t finite = vcaltq_f32(x, vdupq_n_f32(__builtin_inff()));
  return vbslq_f32(finite, product, vreinterpretq_f32_u32(end));
}

// Bytes 0 of 16 words.
uint8x16_t low_bytes(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
  const uint16x8_t low = vuzp1q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b));
  const uint16x8_t high = vuzp1q_u16(vreinterpretq_u16_u32(c), vreinterpretq_u16_u32(d));
  return vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
}

// Finds codes by looking up the cell of x; each code is in both nibbles.
struct CellEncoder {
  uint8x16x2_t thresholds[4];
  uint8x16x2_t below, above;

  explicit CellEncoder(const QuantizeArgs &args) {
    const auto *limits = (const uint32_t *)args.cells->thresholds;
    const Bytes4 low = Bytes4::load(limits), high = Bytes4::load(limits + 16);
    for (int i = 0; i < 4; ++i) thresholds[i] = {low.by[i], high.by[i]};
    const Bytes4 codes = Bytes4::load(args.cells->codes);
    const Bytes4 next_codes = Bytes4::load(args.cells->codes + 16);
    below = {codes.by[0], next_codes.by[0]};
    above = {codes.by[1], next_codes.by[1]};
  }

  uint8x16_t encode(const Floats16 &x) const {
    // Beyond 2^23 floats are integers, so the sum's low bits are the cell.
    constexpr float kIntegers = 0x1.8p23f;
    const auto cell_of = [](float32x4_t each) {
      return vreinterpretq_u32_f32(
          vfmaq_f32(vdupq_n_f32(kIntegers), each, vdupq_n_f32(Cells::kPerUnit)));
    };
    const uint8x16_t cells =
        vandq_u8(low_bytes(cell_of(x.q[0]), cell_of(x.q[1]), cell_of(x.q[2]), cell_of(x.q[3])),
                 vdupq_n_u8(Cells::kEntries - 1));
    const Floats16 limits =
        Bytes4{vqtbl2q_u8(thresholds[0], cells), vqtbl2q_u8(thresholds[1], cells),
               vqtbl2q_u8(thresholds[2], cells), vqtbl2q_u8(thresholds[3], cells)}
            .join();
    const uint8x16_t exceeds =
        low_bytes(vcgtq_f32(x.q[0], limits.q[0]), vcgtq_f32(x.q[1], limits.q[1]),
                  vcgtq_f32(x.q[2], limits.q[2]), vcgtq_f32(x.q[3], limits.q[3]));
    return vbslq_u8(exceeds, vqtbl2q_u8(above, cells), vqtbl2q_u8(below, cells));
  }
};

// Finds codes by the number of thresholds that x exceeds.
struct RankEncoder {
  const float *thresholds;
  uint8x16_t codes;  // in both nibbles

  explicit RankEncoder(const QuantizeArgs &args) : thresholds(args.thresholds) {
    const uint8x16_t low = vld1q_u8(args.codes);
    codes = vorrq_u8(low, vshlq_n_u8(low, 4));
  }

  uint8x16_t encode(const Floats16 &x) const {
    uint32x4_t ranks[4] = {};
    for (int i = 0; i < 15; ++i) {
      const float32x4_t threshold = vdupq_n_f32(thresholds[i]);
      NF4_UNROLL
      for (int k = 0; k < 4; ++k) ranks[k] = vsubq_u32(ranks[k], vcgtq_f32(x.q[k], threshold));
    }
    return vqtbl1q_u8(codes, low_bytes(ranks[0], ranks[1], ranks[2], ranks[3]));
  }
};

template <class T, bool kFinite, class Encoder>
void encode_block(const Encoder &encoder, const char *in, int64_t elements, float factor,
                  uint8_t *packed) {
  const float32x4_t inverse = vdupq_n_f32(factor);
  for (int64_t i = 0; i < elements; i += kKernelStep, packed += kKernelStep / 2) {
    uint8x16_t codes[2];
    NF4_UNROLL
    for (int half = 0; half < 2; ++half, in += 16 * T::kBytes) {
      const Floats16 x = By16<T>::load(in);
      codes[half] = encoder.encode(
          {normalise<kFinite>(x.q[0], inverse), normalise<kFinite>(x.q[1], inverse),
           normalise<kFinite>(x.q[2], inverse), normalise<kFinite>(x.q[3], inverse)});
    }
    const uint8x16_t even = vuzp1q_u8(codes[0], codes[1]), odd = vuzp2q_u8(codes[0], codes[1]);
    vst1q_u8(packed, vbslq_u8(vdupq_n_u8(0xf0), even, odd));
  }
}

// The scales of this many blocks are computed before any of the blocks is encoded, so that the
// latencies of one block's scale hide behind the others'.
constexpr int64_t kBatch = 8;

template <class T>
void find_scales(const QuantizeArgs &args, const char *in, int64_t blocks, float *absmax,
                 float *inverse, bool *finite) {
  alignas(16) float scales[kBatch] = {};
  for (int64_t i = 0; i < blocks; ++i) {
    const char *block = in + i * args.blocksize * T::kBytes;
    scales[i] = Largest<T, false>::of(block, args.blocksize);
    finite[i] = scales[i] < __builtin_inff();
    if (!finite[i]) scales[i] = Largest<T, true>::of(block, args.blocksize);
    absmax[i] = scales[i];
  }
  constexpr float kSmallestNormal = 0x1p-126f;
  for (int64_t i = 0; i < kBatch; i += 4)
    vst1q_f32(inverse + i, vdivq_f32(vdupq_n_f32(1), vmaxq_f32(vld1q_f32(scales + i),
                                                               vdupq_n_f32(kSmallestNormal))));
}

template <class T, class Encoder>
void quantize_blocks(const Encoder &encoder, const QuantizeArgs &args) {
  const char *in = static_cast<const char *>(args.in);
  uint8_t *packed = args.packed;
  alignas(16) float inverse[kBatch];
  bool finite[kBatch];
  for (int64_t first = 0; first < args.blocks; first += kBatch) {
    const int64_t blocks = args.blocks - first < kBatch ? args.blocks - first : kBatch;
    find_scales<T>(args, in, blocks, args.absmax + first, inverse, finite);
    for (int64_t i = 0; i < blocks; ++i) {
      const auto encode =
          finite[i] ? encode_block<T, true, Encoder> : encode_block<T, false, Encoder>;
      encode(encoder, in, args.blocksize, inverse[i], packed);
      in += args.blocksize * T::kBytes;
      packed += args.blocksize / 2;
    }
  }
}

template <class T>
void quantize(const QuantizeArgs &args) {
  if (args.cells != nullptr)
    quantize_blocks<T>(CellEncoder(args), args);
  else
    quantize_blocks<T>(RankEncoder(args), args);
}

struct Integers4 {
  using Vector = float32x4_t;
  using Integers = int32x4_t;
  using Mask = uint32x4_t;
  static constexpr int kLanes = 4;

  static Vector zero() { return set(0); }
  static Vector set(float x) { return vdupq_n_f32(x); }
  static Vector load(const float *x) { return vld1q_f32(x); }
  static void store(float *to, Vector x) { vst1q_f32(to, x); }
  static Vector min(Vector a, Vector b) { return vminq_f32(a, b); }
  static Vector max(Vector a, Vector b) { return vmaxq_f32(a, b); }
  static Vector negative(Vector x) { return vnegq_f32(x); }
  static Vector add(Vector a, Vector b) { return vaddq_f32(a, b); }
  static Vector subtract(Vector a, Vector b) { return vsubq_f32(a, b); }
  static Vector multiply(Vector a, Vector b) { return vmulq_f32(a, b); }
  static Vector divide(Vector a, Vector b) { return vdivq_f32(a, b); }
  static Vector multiply_add(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }
  static Vector multiply_subtract(Vector a, Vector b, Vector from) { return vfmsq_f32(from, a, b); }
  static Vector nearest(Vector x) { return vrndnq_f32(x); }
  static float lowest(Vector x) { return vminvq_f32(x); }
  static float highest(Vector x) { return vmaxvq_f32(x); }
  static Mask all() { return vdupq_n_u32(~0u); }
  static bool is_all(Mask mask) { return vminvq_u32(mask) == ~0u; }
  static Mask is_finite(Vector x) { return vcaltq_f32(x, set(__builtin_inff())); }
  static Vector where(Mask mask, Vector x) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), mask));
  }
  static Vector replace_nan(Vector x, Vector of, Vector by) {
    return vbslq_f32(vceqq_f32(of, of), x, by);
  }
  static Integers to_integers(Vector x) { return vcvtnq_s32_f32(x); }
  static Integers add_integers(Integers a, Integers b) { return vaddq_s32(a, b); }
  // Rounds to the nearest 16-bit number, within the positive finite ones.
  static Vector round_scale(Vector x, bool fp16, uint16_t *bits) {
    const uint16x4_t nearest = vget_low_u16(fp16 ? round_to_fp16(x, x) : round_to_bf16(x, x));
    const uint16x4_t within =
        vmin_u16(vmax_u16(nearest, vdup_n_u16(1)), vdup_n_u16(fp16 ? 0x7bff : 0x7f7f));
    vst1_u16(bits, within);
    return fp16 ? Fp16::widen(within) : Bf16::widen(within);
  }
  static void pack(const Integers (&codes)[8], uint8_t *out) {
    const auto bytes = [&](int i) {
      return low_bytes(vreinterpretq_u32_s32(codes[i]), vreinterpretq_u32_s32(codes[i + 1]),
                       vreinterpretq_u32_s32(codes[i + 2]), vreinterpretq_u32_s32(codes[i + 3]));
    };
    const uint8x16_t low = bytes(0), high = bytes(4);
    vst1q_u8(out, vsliq_n_u8(vuzp1q_u8(low, high), vuzp2q_u8(low, high), 4));
  }
};

}  // namespace

const QuantizeKernels kNeonQuantize = {
    {quantize<Fp32>, quantize<Fp16>, quantize<Bf16>},
    encode_scales<Integers4>,
    {int4_range<Integers4, Fp32>, int4_range<Integers4, Fp16>, int4_range<Integers4, Bf16>},
    int4_scales<Integers4>,
    {int4_codes<Integers4, Fp32>, int4_codes<Integers4, Fp16>, int4_codes<Integers4, Bf16>},
};

}  // namespace nf4::cpu
