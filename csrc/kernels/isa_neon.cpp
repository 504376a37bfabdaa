// AArch64 NEON with the dot product extension (Armv8.2). A register holds half a 32-block, as signed codes.
//
// One token: sixteen blocks per step, in four groups whose dot products are added pairwise into one lane per
// block. Many tokens: sixteen rows are packed into a panel whose lanes are rows, so that no sum crosses
// lanes.
//
// With HOTSET_I8MM these are the I8MM kernels: the products of a panel use two rows times two tokens at once.
//
// Compile with -ffp-contract=off: for the compiler, vmulq_f32 and vaddq_f32 are ordinary operators.
#include <arm_neon.h>

#include <memory>
#include <utility>

#include "codebooks.h"
#include "kernels.h"

#ifdef HOTSET_I8MM  // isa_i8mm.cpp
namespace hotset::i8mm {
#else
namespace hotset::neon {
#endif

#include "blocks.h"
#include "simd_neon.h"
#include "float_kernels.h"

// Call f.operator()<0>(), f.operator()<1>(), ...: shifts and lanes must be constants.
template <int kCount, class F>
inline void unroll(F f) {
    [&]<int... i>(std::integer_sequence<int, i...>) {
        (f.template operator()<i>(), ...);
    }(std::make_integer_sequence<int, kCount>{});
}

template <int kBits>
inline uint8x16_t shift_right(uint8x16_t v) {
    if constexpr (kBits == 0)
        return v;
    else
        return vshrq_n_u8(v, kBits);
}

// Extract the bits of `mask` from each byte, starting at bit kFirst.
template <int kFirst>
inline uint8x16_t field(uint8x16_t bytes, uint8_t mask) {
    return vandq_u8(shift_right<kFirst>(bytes), vdupq_n_u8(mask));
}

template <int kNibble>
inline uint8x16_t nibbles(uint8x16_t bytes) {
    if constexpr (kNibble == 0)
        return vandq_u8(bytes, vdupq_n_u8(15));
    else
        return vshrq_n_u8(bytes, 4);
}

inline int8x16_t as_signed(uint8x16_t codes) {
    return vreinterpretq_s8_u8(codes);
}
inline int8x16_t minus(uint8x16_t codes, int zero) {
    return vsubq_s8(as_signed(codes), vdupq_n_s8(int8_t(zero)));
}

// Return `high` in each byte whose bit kBit is set.
template <int kBit>
inline uint8x16_t where_bit(uint8x16_t bytes, uint8_t high) {
    return vandq_u8(vtstq_u8(bytes, vdupq_n_u8(1 << kBit)), vdupq_n_u8(high));
}

inline int8x16_t iq4_codes(uint8x16_t indices) {
    return vqtbl1q_s8(vld1q_s8(kIq4Values), indices);
}

inline float32x4_t load_half_broadcast(const uint8_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(load_u16(p))));
}

// Scales of the sixteen blocks of a step, four per register.
struct Scales {
    float32x4_t scale[4];
    float32x4_t min[4];
    int32x4_t sub_scale[2][4];
    int32x4_t sub_min[2][4];
};

// Each format has kBytes of sixteen blocks; unpack<i>(p, a, b) for the codes of block i at p, the first half
// into a, the second into b; scales(p) of all sixteen. Nothing outside the kBytes is read.

// A type without instructions of its own: each block as blocks.h decodes it.
template <Type kOf>
struct Format {
    static_assert(!has_min(kOf) && !has_sub_blocks(kOf));
    static constexpr Type kType = kOf;
    static constexpr int kBytes = 512 / type_facts(kOf).block_size * type_facts(kOf).block_bytes;

    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const Block32 block = decode_block(kType, p, kBlock);
        alignas(16) int8_t codes[32];
        for (int i = 0; i < 32; i++) codes[i] = int8_t(block.q[i]);
        a = vld1q_s8(codes);
        b = vld1q_s8(codes + 16);
    }
    static Scales scales(const uint8_t* p) {
        Scales s;
        unroll<4>([&]<int g>() {
            float scale[4];
            for (int i = 0; i < 4; i++) scale[i] = decode_block(kType, p, 4 * g + i).scale;
            s.scale[g] = vld1q_f32(scale);
        });
        return s;
    }
};

// Types with 32-blocks: an f16 scale (and minimum) at the beginning of each block.
template <Type kBlockType>
struct SmallBlocks {
    static constexpr Type kType = kBlockType;
    static constexpr int kBlockBytes = type_facts(kType).block_bytes;
    static constexpr int kBytes = 16 * kBlockBytes;
    static constexpr int kHead = has_min(kType) ? 4 : 2;

    static Scales scales(const uint8_t* p) {
        Scales s;
        unroll<4>([&]<int g>() {
            const uint8_t* at = p + 4 * g * kBlockBytes;
            if constexpr (has_min(kType)) {
                uint32x4_t words = vdupq_n_u32(load_u32(at));
                words = vsetq_lane_u32(load_u32(at + kBlockBytes), words, 1);
                words = vsetq_lane_u32(load_u32(at + 2 * kBlockBytes), words, 2);
                words = vsetq_lane_u32(load_u32(at + 3 * kBlockBytes), words, 3);
                s.scale[g] = vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(words)));
                s.min[g] = vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32(words, 16)));
            } else {
                uint16x4_t halves = vdup_n_u16(load_u16(at));
                halves = vset_lane_u16(load_u16(at + kBlockBytes), halves, 1);
                halves = vset_lane_u16(load_u16(at + 2 * kBlockBytes), halves, 2);
                halves = vset_lane_u16(load_u16(at + 3 * kBlockBytes), halves, 3);
                s.scale[g] = vcvt_f32_f16(vreinterpret_f16_u16(halves));
            }
        });
        return s;
    }
};

template <>
struct Format<Type::Q4_0> : SmallBlocks<Type::Q4_0> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8x16_t codes = vld1q_u8(p + kBlock * kBlockBytes + kHead);
        a = minus(nibbles<0>(codes), 8);
        b = minus(nibbles<1>(codes), 8);
    }
};

template <>
struct Format<Type::Q4_1> : SmallBlocks<Type::Q4_1> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8x16_t codes = vld1q_u8(p + kBlock * kBlockBytes + kHead);
        a = as_signed(nibbles<0>(codes));
        b = as_signed(nibbles<1>(codes));
    }
};

// Return 0xff in byte i if bit i of byte 2 * kHalf, or of the following byte, is set.
template <int kHalf>
inline uint8x16_t bits_to_bytes(uint32_t bits) {
    alignas(16) static constexpr uint8_t kBit[16] = {1, 2, 4, 8, 16, 32, 64, 128,
                                                     1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t bytes =
        vcombine_u8(vdup_n_u8(uint8_t(bits >> (16 * kHalf))), vdup_n_u8(uint8_t(bits >> (16 * kHalf + 8))));
    return vtstq_u8(bytes, vld1q_u8(kBit));
}

template <>
struct Format<Type::Q5_0> : SmallBlocks<Type::Q5_0> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8_t* at = p + kBlock * kBlockBytes + kHead;
        const uint8x16_t codes = vld1q_u8(at + 4), negative = vdupq_n_u8(0xf0);
        // Subtract 16 if the fifth bit is clear: the sign bits are set, and the code is signed.
        a = as_signed(vorrq_u8(nibbles<0>(codes), vbicq_u8(negative, bits_to_bytes<0>(load_u32(at)))));
        b = as_signed(vorrq_u8(nibbles<1>(codes), vbicq_u8(negative, bits_to_bytes<1>(load_u32(at)))));
    }
};

template <>
struct Format<Type::Q5_1> : SmallBlocks<Type::Q5_1> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8_t* at = p + kBlock * kBlockBytes + kHead;
        const uint8x16_t codes = vld1q_u8(at + 4), sixteen = vdupq_n_u8(16);
        a = as_signed(vorrq_u8(nibbles<0>(codes), vandq_u8(sixteen, bits_to_bytes<0>(load_u32(at)))));
        b = as_signed(vorrq_u8(nibbles<1>(codes), vandq_u8(sixteen, bits_to_bytes<1>(load_u32(at)))));
    }
};

template <>
struct Format<Type::Q8_0> : SmallBlocks<Type::Q8_0> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8_t* at = p + kBlock * kBlockBytes + kHead;
        a = as_signed(vld1q_u8(at));
        b = as_signed(vld1q_u8(at + 16));
    }
};

template <>
struct Format<Type::IQ4_NL> : SmallBlocks<Type::IQ4_NL> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8x16_t codes = vld1q_u8(p + kBlock * kBlockBytes + kHead);
        a = iq4_codes(nibbles<0>(codes));
        b = iq4_codes(nibbles<1>(codes));
    }
};

template <>
struct Format<Type::MXFP4> {
    static constexpr Type kType = Type::MXFP4;
    static constexpr int kBlockBytes = 17, kBytes = 16 * kBlockBytes;

    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8x16_t packed = vld1q_u8(p + kBlock * kBlockBytes + 1);
        const int8x16_t values = vld1q_s8(kFp4Values);
        a = vqtbl1q_s8(values, nibbles<0>(packed));
        b = vqtbl1q_s8(values, nibbles<1>(packed));
    }
    static Scales scales(const uint8_t* p) {
        Scales s;
        unroll<4>([&]<int g>() {
            const uint8_t* at = p + 4 * g * kBlockBytes;
            uint32x4_t e = vdupq_n_u32(at[0]);
            e = vsetq_lane_u32(at[kBlockBytes], e, 1);
            e = vsetq_lane_u32(at[2 * kBlockBytes], e, 2);
            e = vsetq_lane_u32(at[3 * kBlockBytes], e, 3);
            const uint32x4_t normal = vshlq_n_u32(vsubq_u32(e, vdupq_n_u32(1)), 23);
            const uint32x4_t tiny = vshlq_u32(vdupq_n_u32(1 << 21), vreinterpretq_s32_u32(e));
            s.scale[g] = vreinterpretq_f32_u32(vbslq_u32(vcltq_u32(e, vdupq_n_u32(2)), tiny, normal));
        });
        return s;
    }
};

// Types with super-blocks of 256: sixteen 32-blocks are two of them. In `unpack`, super_block<i> is the
// address of block i's super-block; kPart and kPlace are the block's 128 weights in it, and its 32 weights in
// those.
template <Type kBlockType>
struct SuperBlocks {
    static constexpr Type kType = kBlockType;
    static constexpr int kSuperBytes = type_facts(kType).block_bytes;
    static constexpr int kBytes = 2 * kSuperBytes;

    template <int kBlock>
    static const uint8_t* super_block(const uint8_t* p) {
        return p + kBlock / 8 * kSuperBytes;
    }
    template <int kBlock>
    static constexpr int kPart = kBlock % 8 / 4;
    template <int kBlock>
    static constexpr int kPlace = kBlock % 4;
};

template <>
struct Format<Type::IQ4_XS> : SuperBlocks<Type::IQ4_XS> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8x16_t codes = vld1q_u8(super_block<kBlock>(p) + 8 + kBlock % 8 * 16);
        a = iq4_codes(nibbles<0>(codes));
        b = iq4_codes(nibbles<1>(codes));
    }
    static Scales scales(const uint8_t* p) {
        alignas(16) static constexpr int32_t kLowShift[8] = {0, -4, -8, -12, -16, -20, -24, -28};
        alignas(16) static constexpr int32_t kHighShift[8] = {4, 2, 0, -2, -4, -6, -8, -10};
        Scales s;
        for (int g = 0; g < 4; g++) {
            const uint8_t* at = p + g / 2 * kSuperBytes;
            const uint32x4_t low = vshlq_u32(vdupq_n_u32(load_u32(at + 4)), vld1q_s32(kLowShift + g % 2 * 4));
            const uint32x4_t high =
                vshlq_u32(vdupq_n_u32(load_u16(at + 2)), vld1q_s32(kHighShift + g % 2 * 4));
            const uint32x4_t sub =
                vorrq_u32(vandq_u32(low, vdupq_n_u32(15)), vandq_u32(high, vdupq_n_u32(48)));
            const int32x4_t centred = vsubq_s32(vreinterpretq_s32_u32(sub), vdupq_n_s32(32));
            s.scale[g] = vmulq_f32(load_half_broadcast(at), vcvtq_f32_s32(centred));
        }
        return s;
    }
};

// Widen eight bytes to two registers of int32.
inline void widen(uint8x8_t bytes, int32x4_t out[2]) {
    const uint16x8_t wide = vmovl_u8(bytes);
    out[0] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide)));
    out[1] = vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(wide)));
}

inline void widen(int8x8_t bytes, int32x4_t out[2]) {
    const int16x8_t wide = vmovl_s8(bytes);
    out[0] = vmovl_s16(vget_low_s16(wide));
    out[1] = vmovl_s16(vget_high_s16(wide));
}

inline uint8x8_t eight_bytes(uint32_t low, uint32_t high) {
    return vcreate_u8(low | uint64_t(high) << 32);
}

// Q4_K and Q5_K.
template <Type kBlockType>
struct KBlocks : SuperBlocks<kBlockType> {
    using SuperBlocks<kBlockType>::kSuperBytes;

    static Scales scales(const uint8_t* p) {
        Scales s;
        for (int super = 0; super < 2; super++) {
            const uint8_t* at = p + super * kSuperBytes;
            const uint32_t w0 = load_u32(at + 4), w1 = load_u32(at + 8), w2 = load_u32(at + 12);
            int32x4_t scale[2], min[2];
            widen(eight_bytes(w0 & 0x3f3f3f3f, (w2 & 0x0f0f0f0f) | (w0 >> 2 & 0x30303030)), scale);
            widen(eight_bytes(w1 & 0x3f3f3f3f, (w2 >> 4 & 0x0f0f0f0f) | (w1 >> 2 & 0x30303030)), min);
            const float32x4_t d = load_half_broadcast(at), dmin = vnegq_f32(load_half_broadcast(at + 2));
            for (int i = 0; i < 2; i++) {
                s.scale[2 * super + i] = vmulq_f32(d, vcvtq_f32_s32(scale[i]));
                s.min[2 * super + i] = vmulq_f32(dmin, vcvtq_f32_s32(min[i]));
            }
        }
        return s;
    }
};

template <>
struct Format<Type::Q4_K> : KBlocks<Type::Q4_K> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8_t* codes = super_block<kBlock>(p) + 16 + kBlock % 8 / 2 * 32;
        a = as_signed(nibbles<kBlock % 2>(vld1q_u8(codes)));
        b = as_signed(nibbles<kBlock % 2>(vld1q_u8(codes + 16)));
    }
};

template <>
struct Format<Type::Q5_K> : KBlocks<Type::Q5_K> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8_t* s = super_block<kBlock>(p);
        const uint8_t* codes = s + 48 + kBlock % 8 / 2 * 32;
        const uint8x16_t high_a = where_bit<kBlock % 8>(vld1q_u8(s + 16), 16);
        const uint8x16_t high_b = where_bit<kBlock % 8>(vld1q_u8(s + 32), 16);
        a = as_signed(vorrq_u8(nibbles<kBlock % 2>(vld1q_u8(codes)), high_a));
        b = as_signed(vorrq_u8(nibbles<kBlock % 2>(vld1q_u8(codes + 16)), high_b));
    }
};

// Split the sixteen sub-block scales of a super-block: even ones belong to first halves, odd ones to second
// halves.
inline void split_pairs(int8x16_t bytes, int super, int32x4_t out[2][4]) {
    widen(vget_low_s8(vuzp1q_s8(bytes, bytes)), out[0] + 2 * super);
    widen(vget_low_s8(vuzp2q_s8(bytes, bytes)), out[1] + 2 * super);
}

template <>
struct Format<Type::Q6_K> : SuperBlocks<Type::Q6_K> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8_t* low = super_block<kBlock>(p) + 64 * kPart<kBlock> + 32 * (kBlock % 2);
        const uint8_t* high = super_block<kBlock>(p) + 128 + 32 * kPart<kBlock>;
        auto codes = [](const uint8_t* lo, const uint8_t* hi) {
            const uint8x16_t top = field<2 * kPlace<kBlock>>(vld1q_u8(hi), 3);
            return minus(vorrq_u8(nibbles<kPlace<kBlock> / 2>(vld1q_u8(lo)), vshlq_n_u8(top, 4)), 32);
        };
        a = codes(low, high);
        b = codes(low + 16, high + 16);
    }
    static Scales scales(const uint8_t* p) {
        Scales s;
        for (int super = 0; super < 2; super++) {
            const uint8_t* at = p + super * kSuperBytes;
            s.scale[2 * super] = s.scale[2 * super + 1] = load_half_broadcast(at + 208);
            split_pairs(as_signed(vld1q_u8(at + 192)), super, s.sub_scale);
        }
        return s;
    }
};

template <>
struct Format<Type::Q3_K> : SuperBlocks<Type::Q3_K> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8_t* s = super_block<kBlock>(p);
        auto codes = [](const uint8_t* low, const uint8_t* high) {
            const uint8x16_t set =
                where_bit<kBlock % 8>(vld1q_u8(high), 0xfc);  // minus 4 if clear: the sign bits
            return as_signed(
                vorrq_u8(field<2 * kPlace<kBlock>>(vld1q_u8(low), 3), veorq_u8(set, vdupq_n_u8(0xfc))));
        };
        a = codes(s + 32 + 32 * kPart<kBlock>, s);
        b = codes(s + 48 + 32 * kPart<kBlock>, s + 16);
    }
    static Scales scales(const uint8_t* p) {
        Scales s;
        for (int super = 0; super < 2; super++) {
            const uint8_t* at = p + super * kSuperBytes;
            const uint32_t w0 = load_u32(at + 96), w1 = load_u32(at + 100), w2 = load_u32(at + 104);
            const uint8x16_t bytes =
                vcombine_u8(eight_bytes((w0 & 0x0f0f0f0f) | (w2 << 4 & 0x30303030),
                                        (w1 & 0x0f0f0f0f) | (w2 << 2 & 0x30303030)),
                            eight_bytes((w0 >> 4 & 0x0f0f0f0f) | (w2 & 0x30303030),
                                        (w1 >> 4 & 0x0f0f0f0f) | (w2 >> 2 & 0x30303030)));
            s.scale[2 * super] = s.scale[2 * super + 1] = load_half_broadcast(at + 108);
            split_pairs(minus(bytes, 32), super, s.sub_scale);
        }
        return s;
    }
};

template <>
struct Format<Type::Q2_K> : SuperBlocks<Type::Q2_K> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8_t* codes = super_block<kBlock>(p) + 16 + 32 * kPart<kBlock>;
        a = as_signed(field<2 * kPlace<kBlock>>(vld1q_u8(codes), 3));
        b = as_signed(field<2 * kPlace<kBlock>>(vld1q_u8(codes + 16), 3));
    }
    static Scales scales(const uint8_t* p) {
        Scales s;
        for (int super = 0; super < 2; super++) {
            const uint8_t* at = p + super * kSuperBytes;
            const uint8x16_t bytes = vld1q_u8(at);
            s.scale[2 * super] = s.scale[2 * super + 1] = load_half_broadcast(at + 80);
            s.min[2 * super] = s.min[2 * super + 1] = vnegq_f32(load_half_broadcast(at + 82));
            split_pairs(as_signed(nibbles<0>(bytes)), super, s.sub_scale);
            split_pairs(as_signed(nibbles<1>(bytes)), super, s.sub_min);
        }
        return s;
    }
};

// Ternary types.

template <>
struct Format<Type::TQ2_0> : SuperBlocks<Type::TQ2_0> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8_t* codes = super_block<kBlock>(p) + 32 * kPart<kBlock>;
        a = minus(field<2 * kPlace<kBlock>>(vld1q_u8(codes), 3), 1);
        b = minus(field<2 * kPlace<kBlock>>(vld1q_u8(codes + 16), 3), 1);
    }
    static Scales scales(const uint8_t* p) {
        Scales s;
        for (int g = 0; g < 4; g++) s.scale[g] = load_half_broadcast(p + g / 2 * kSuperBytes + 64);
        return s;
    }
};

template <>
struct Format<Type::TQ1_0> : SuperBlocks<Type::TQ1_0> {
    // Multiply bytes by powers of three modulo 256, and return the first base-3 digit of the resulting
    // fractions, minus 1: two comparisons, each -1 if true.
    static int8x16_t digits(uint8x16_t bytes, uint8x16_t powers) {
        const uint8x16_t x = vmulq_u8(bytes, powers);
        return as_signed(vmvnq_u8(vaddq_u8(vcgeq_u8(x, vdupq_n_u8(86)), vcgeq_u8(x, vdupq_n_u8(171)))));
    }
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        constexpr uint8_t kPower[5] = {1, 3, 9, 27, 81};
        constexpr int kAt = kBlock % 8, kPair = kAt < 5 ? 0 : 2 * (kAt - 5);
        const uint8_t* s = super_block<kBlock>(p);
        if constexpr (kAt < 5) {
            a = digits(vld1q_u8(s), vdupq_n_u8(kPower[kAt]));
            b = digits(vld1q_u8(s + 16), vdupq_n_u8(kPower[kAt]));
        } else if constexpr (kAt < 7) {
            a = digits(vld1q_u8(s + 32), vdupq_n_u8(kPower[kPair]));
            b = digits(vld1q_u8(s + 32), vdupq_n_u8(kPower[kPair + 1]));
        } else {
            alignas(16) static constexpr uint8_t kFour[16] = {1, 1, 1, 1, 3,  3,  3,  3,
                                                              9, 9, 9, 9, 27, 27, 27, 27};
            a = digits(vld1q_u8(s + 32), vdupq_n_u8(81));
            b = digits(vreinterpretq_u8_u32(vdupq_n_u32(load_u32(s + 48))), vld1q_u8(kFour));
        }
    }
    static Scales scales(const uint8_t* p) {
        Scales s;
        for (int g = 0; g < 4; g++) s.scale[g] = load_half_broadcast(p + g / 2 * kSuperBytes + 52);
        return s;
    }
};

// Lattices: codebook groups are looked up one by one; then signs, one bit per weight.

inline uint8x16_t two_groups(uint64_t low, uint64_t high) {
    return vcombine_u8(vcreate_u8(low), vcreate_u8(high));
}
inline uint8x16_t four_groups(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return two_groups(a | uint64_t(b) << 32, c | uint64_t(d) << 32);
}

// Return the weights of half a block, negative where one of its sixteen bits is set.
template <int kHalf>
inline int8x16_t put_signs(uint8x16_t weights, uint32_t signs) {
    const int8x16_t minus = as_signed(bits_to_bytes<kHalf>(signs));
    return vsubq_s8(veorq_s8(as_signed(weights), minus), minus);
}

// Return four float scales: (2s + 1) * unit.
inline float32x4_t odd_scales(float32x4_t unit, uint32x4_t s) {
    return vmulq_f32(unit, vcvtq_f32_u32(vaddq_u32(vaddq_u32(s, s), vdupq_n_u32(1))));
}

inline float32x4_t part_of_half(const uint8_t* p, float part) {
    return vmulq_n_f32(load_half_broadcast(p), part);
}

template <>
struct Format<Type::IQ2_XXS> : SuperBlocks<Type::IQ2_XXS> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8_t* s = super_block<kBlock>(p) + 2 + kBlock % 8 * 8;
        const uint32_t signs = uint32_t(with_eighth_signs(four_sevens(load_u32(s + 4))));
        a = put_signs<0>(two_groups(kIq2Xxs[s[0]], kIq2Xxs[s[1]]), signs);
        b = put_signs<1>(two_groups(kIq2Xxs[s[2]], kIq2Xxs[s[3]]), signs);
    }
    static Scales scales(const uint8_t* p) {
        Scales s;
        for (int g = 0; g < 4; g++) {
            const uint8_t* at = p + g / 2 * kSuperBytes;
            const uint32x4x2_t words =
                vld2q_u32(reinterpret_cast<const uint32_t*>(at + 2 + g % 2 * 32));  // indices, signs
            s.scale[g] = odd_scales(part_of_half(at, 0.125f), vshrq_n_u32(words.val[1], 28));
        }
        return s;
    }
};

// Return the scales of sixteen weights, stored as nibbles at offset kAt.
template <class Format, int kAt>
inline Scales nibble_scales(const uint8_t* p) {
    Scales s;
    for (int super = 0; super < 2; super++) {
        const uint8_t* at = p + super * Format::kSuperBytes;
        const uint8x8_t bytes = vld1_u8(at + kAt), one = vdup_n_u8(1);
        s.scale[2 * super] = s.scale[2 * super + 1] = part_of_half(at, 0.125f);
        widen(vorr_u8(vand_u8(vshl_n_u8(bytes, 1), vdup_n_u8(30)), one), s.sub_scale[0] + 2 * super);
        widen(vorr_u8(vand_u8(vshr_n_u8(bytes, 3), vdup_n_u8(30)), one), s.sub_scale[1] + 2 * super);
    }
    return s;
}

template <>
struct Format<Type::IQ2_XS> : SuperBlocks<Type::IQ2_XS> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8_t* s = super_block<kBlock>(p) + 2 + kBlock % 8 * 8;
        uint32_t code[4], seven = 0;
        for (int l = 0; l < 4; l++) {
            code[l] = load_u16(s + 2 * l);
            seven |= code[l] >> 9 << (8 * l);
        }
        const uint32_t signs = uint32_t(with_eighth_signs(seven));
        a = put_signs<0>(two_groups(kIq2Xs[code[0] & 511], kIq2Xs[code[1] & 511]), signs);
        b = put_signs<1>(two_groups(kIq2Xs[code[2] & 511], kIq2Xs[code[3] & 511]), signs);
    }
    static Scales scales(const uint8_t* p) { return nibble_scales<Format<Type::IQ2_XS>, 66>(p); }
};

template <>
struct Format<Type::IQ2_S> : SuperBlocks<Type::IQ2_S> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8_t* super = super_block<kBlock>(p);
        const uint8_t* s = super + 2 + kBlock % 8 * 4;
        const uint32_t high = super[66 + kBlock % 8], signs = load_u32(s + 32);
        auto group = [&](int l) { return kIq2S[s[l] | (high << 8 >> (2 * l) & 0x300)]; };
        a = put_signs<0>(two_groups(group(0), group(1)), signs);
        b = put_signs<1>(two_groups(group(2), group(3)), signs);
    }
    static Scales scales(const uint8_t* p) { return nibble_scales<Format<Type::IQ2_S>, 74>(p); }
};

template <>
struct Format<Type::IQ3_XXS> : SuperBlocks<Type::IQ3_XXS> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8_t* super = super_block<kBlock>(p);
        const uint8_t* s = super + 2 + kBlock % 8 * 8;
        const uint32_t words = load_u32(super + 66 + kBlock % 8 * 4);
        const uint32_t signs = uint32_t(with_eighth_signs(four_sevens(words)));
        auto group = [s](int l) { return kIq3Xxs[s[l]]; };
        a = put_signs<0>(four_groups(group(0), group(1), group(2), group(3)), signs);
        b = put_signs<1>(four_groups(group(4), group(5), group(6), group(7)), signs);
    }
    static Scales scales(const uint8_t* p) {
        Scales s;
        for (int g = 0; g < 4; g++) {
            const uint8_t* at = p + g / 2 * kSuperBytes;
            const uint32x4_t words = vreinterpretq_u32_u8(vld1q_u8(at + 66 + g % 2 * 16));
            s.scale[g] = odd_scales(part_of_half(at, 0.25f), vshrq_n_u32(words, 28));
        }
        return s;
    }
};

template <>
struct Format<Type::IQ3_S> : SuperBlocks<Type::IQ3_S> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8_t* super = super_block<kBlock>(p);
        const uint8_t* s = super + 2 + kBlock % 8 * 8;
        const uint32_t high = super[66 + kBlock % 8], signs = load_u32(super + 74 + kBlock % 8 * 4);
        auto group = [&](int l) { return kIq3S[s[l] | (high << 8 >> l & 256)]; };
        a = put_signs<0>(four_groups(group(0), group(1), group(2), group(3)), signs);
        b = put_signs<1>(four_groups(group(4), group(5), group(6), group(7)), signs);
    }
    static Scales scales(const uint8_t* p) {
        alignas(16) static constexpr int32_t kShift[8] = {0, -4, -8, -12, -16, -20, -24, -28};
        Scales s;
        for (int g = 0; g < 4; g++) {
            const uint8_t* at = p + g / 2 * kSuperBytes;
            const uint32x4_t moved =
                vshlq_u32(vdupq_n_u32(load_u32(at + 106)), vld1q_s32(kShift + g % 2 * 4));
            s.scale[g] = odd_scales(load_half_broadcast(at), vandq_u32(moved, vdupq_n_u32(15)));
        }
        return s;
    }
};

// Return the weights of IQ1: kIq1Zero plus the value, minus 2 if the delta is negative.
inline int8x16_t put_deltas(uint8x16_t weights, uint8x8_t low, uint8x8_t high) {
    return as_signed(vsubq_u8(weights, vcombine_u8(low, high)));
}
inline uint8x8_t delta_offset(bool negative) {
    return vdup_n_u8(uint8_t(kIq1Zero + (negative ? 2 : 0)));
}

template <>
struct Format<Type::IQ1_S> : SuperBlocks<Type::IQ1_S> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8_t* super = super_block<kBlock>(p);
        const uint8_t* s = super + 2 + kBlock % 8 * 4;
        const uint32_t high = load_u16(super + 34 + kBlock % 8 * 2);
        auto group = [&](int l) { return kIq1[s[l] | (high >> (3 * l) & 7) << 8]; };
        const uint8x8_t offset = delta_offset(high >> 15);
        a = put_deltas(two_groups(group(0), group(1)), offset, offset);
        b = put_deltas(two_groups(group(2), group(3)), offset, offset);
    }
    static Scales scales(const uint8_t* p) {
        Scales s;
        for (int super = 0; super < 2; super++) {
            const uint8_t* at = p + super * kSuperBytes;
            const uint16x8_t steps =
                vandq_u16(vshrq_n_u16(vreinterpretq_u16_u8(vld1q_u8(at + 34)), 12), vdupq_n_u16(7));
            const float32x4_t unit = part_of_half(at, 0.125f);
            s.scale[2 * super] = odd_scales(unit, vmovl_u16(vget_low_u16(steps)));
            s.scale[2 * super + 1] = odd_scales(unit, vmovl_u16(vget_high_u16(steps)));
        }
        return s;
    }
};

template <>
struct Format<Type::IQ1_M> : SuperBlocks<Type::IQ1_M> {
    template <int kBlock>
    static void unpack(const uint8_t* p, int8x16_t& a, int8x16_t& b) {
        const uint8_t* super = super_block<kBlock>(p);
        const uint8_t* s = super + kBlock % 8 * 4;
        const uint32_t high = load_u16(super + 32 + kBlock % 8 * 2);  // one nibble per group
        auto group = [&](int l) { return kIq1[s[l] | (high >> (4 * l) & 7) << 8]; };
        auto offset = [&](int l) { return delta_offset(high >> (4 * l) & 8); };
        a = put_deltas(two_groups(group(0), group(1)), offset(0), offset(1));
        b = put_deltas(two_groups(group(2), group(3)), offset(2), offset(3));
    }
    static Scales scales(const uint8_t* p) {
        alignas(16) static constexpr int16_t kShift[8] = {1, -2, -5, -8, 1, -2, -5, -8};  // to twice a field
        Scales s;
        for (int super = 0; super < 2; super++) {
            const uint8_t* at = p + super * kSuperBytes;
            auto steps = [&](int word) {  // four each of words `word` and `word` + 1
                const uint16x8_t both = vcombine_u16(vdup_n_u16(load_u16(at + 48 + 2 * word)),
                                                     vdup_n_u16(load_u16(at + 50 + 2 * word)));
                const uint16x8_t twice = vandq_u16(vshlq_u16(both, vld1q_s16(kShift)), vdupq_n_u16(14));
                return vmovn_u16(vorrq_u16(twice, vdupq_n_u16(1)));
            };
            s.scale[2 * super] = s.scale[2 * super + 1] = vdupq_n_f32(scale_iq1_m(at + 48) * 0.125f);
            split_pairs(as_signed(vcombine_u8(steps(0), steps(2))), super, s.sub_scale);
        }
        return s;
    }
};

// Return the first n of sixteen blocks at p. At the end of the mapped file they are copied to where sixteen
// can be read.
template <class Format>
inline const uint8_t* readable(const uint8_t* p, int n, const uint8_t* end, uint8_t* copy) {
    if (Format::kBytes <= end - p) return p;
    const size_t bytes = size_t(n) * Format::kBytes / 16;
    memcpy(copy, p, bytes);
    memset(copy + bytes, 0, Format::kBytes - bytes);
    return copy;
}

// The quantised inputs of one token.
struct Token {
    const int8_t* q;
    const float* scale;
    const float* sum;
    const int32_t* isum[2];

    Token() = default;
    Token(const Inputs& x, int t) {
        const int64_t width = padded(x.k);
        q = x.q + t * width;
        scale = x.scale + t * (width / 32);
        sum = x.sum + t * (width / 32);
        isum[0] = x.isum + t * (width / 16);
        isum[1] = isum[0] + width / 32;
    }
};

// Return the sums of four registers, one lane each.
inline int32x4_t lane_per_block(const int32x4_t dots[4]) {
    return vpaddq_s32(vpaddq_s32(dots[0], dots[1]), vpaddq_s32(dots[2], dots[3]));
}

// Add the first n of sixteen blocks of one row, times each token, to the token's acc, one lane per block.
template <class Format, bool kWhole>
inline void add_blocks(const uint8_t* p, int n, const Token* tokens, int n_tokens, int64_t at, V* acc) {
    constexpr bool kMin = has_min(Format::kType), kSub = has_sub_blocks(Format::kType);
    const Scales s = Format::scales(p);
    unroll<4>([&]<int g>() {
        if (!kWhole && 4 * g >= n) return;
        const int64_t b = at + 4 * g;
        int8x16_t codes_a[4], codes_b[4];
        unroll<4>([&]<int j>() { Format::template unpack<4 * g + j>(p, codes_a[j], codes_b[j]); });
        for (int t = 0; t < n_tokens; t++) {
            const Token& x = tokens[t];
            const int8_t* q = x.q + at * 32 + half_at(kInterleaved, 4 * g, 0);
            int32x4_t first[4], second[4];
            unroll<4>([&]<int j>() {
                first[j] = vdotq_s32(vdupq_n_s32(0), codes_a[j], vld1q_s8(q + 16 * j));
                second[j] =
                    vdotq_s32(kSub ? vdupq_n_s32(0) : first[j], codes_b[j], vld1q_s8(q + 64 + 16 * j));
            });
            int32x4_t dot = lane_per_block(second);
            if constexpr (kSub) {
                dot = vmulq_s32(dot, s.sub_scale[1][g]);
                dot = vmlaq_s32(dot, lane_per_block(first), s.sub_scale[0][g]);
            }
            const float32x4_t input = vld1q_f32(x.scale + b);
            float32x4_t total = vfmaq_f32(acc[t].v[g], vmulq_f32(s.scale[g], input), vcvtq_f32_s32(dot));
            if constexpr (kMin && kSub) {
                int32x4_t mins = vmulq_s32(vld1q_s32(x.isum[0] + b), s.sub_min[0][g]);
                mins = vmlaq_s32(mins, vld1q_s32(x.isum[1] + b), s.sub_min[1][g]);
                total = vfmaq_f32(total, vmulq_f32(s.min[g], input), vcvtq_f32_s32(mins));
            } else if constexpr (kMin) {
                total = vfmaq_f32(total, s.min[g], vld1q_f32(x.sum + b));
            }
            acc[t].v[g] = total;
        }
    });
}

// ahead: data as long as the row, to prefetch meanwhile; null: the hardware prefetcher is enough.
template <class Format>
inline float dot(const uint8_t* row, const uint8_t* ahead, const uint8_t* end, int64_t blocks,
                 const Token& x) {
    V acc = V::zero();
    int64_t b = 0;
    const uint8_t* p = row;
    for (; b + 16 <= blocks; b += 16, p += Format::kBytes) {
        if (ahead)
            for (int at = 0; at < Format::kBytes; at += 64) V::fetch(ahead + (p - row) + at);
        add_blocks<Format, true>(p, 16, &x, 1, b, &acc);
    }
    if (const int n = int(blocks - b)) {
        alignas(16) uint8_t copy[Format::kBytes];
        V with_rest = acc;
        add_blocks<Format, false>(readable<Format>(p, n, end, copy), n, &x, 1, b, &with_rest);
        acc = blend_range(0, n, with_rest, acc);  // lanes beyond n are undefined and may be NaN
    }
    return sum(acc);
}

// ---- A few tokens

constexpr int kFewRows = 4;  // rows that share a pass over the inputs

// As for one token, but the codes of sixteen blocks are unpacked once for all tokens.
template <class Format>
void few(const Matrix& w, int64_t row0, int64_t row1, const Inputs& x, int t0, int n, float* out,
         int64_t ld) {
    const int64_t blocks = x.k / 32;
    Token tokens[kFewTokens];
    for (int t = 0; t < n; t++) tokens[t] = Token(x, t0 + t);
    for (int64_t r = row0; r < row1; r += kFewRows) {
        const int rows = imin(row1 - r, kFewRows);
        V acc[kFewRows][kFewTokens];
        for (int i = 0; i < rows; i++)
            for (int t = 0; t < n; t++) acc[i][t] = V::zero();
        int64_t b = 0;
        for (; b + 16 <= blocks; b += 16)
            for (int i = 0; i < rows; i++)
                add_blocks<Format, true>(w.row(r + i) + b / 16 * Format::kBytes, 16, tokens, n, b, acc[i]);
        if (const int count = int(blocks - b))
            for (int i = 0; i < rows; i++) {
                alignas(16) uint8_t copy[Format::kBytes];
                const uint8_t* p = w.row(r + i) + b / 16 * Format::kBytes;
                V with_rest[kFewTokens];
                for (int t = 0; t < n; t++) with_rest[t] = acc[i][t];
                add_blocks<Format, false>(readable<Format>(p, count, w.end(), copy), count, tokens, n, b,
                                          with_rest);
                for (int t = 0; t < n; t++)  // lanes beyond `count` are undefined and may be NaN
                    acc[i][t] = blend_range(0, count, with_rest[t], acc[i][t]);
            }
        for (int i = 0; i < rows; i++)
            for (int t = 0; t < n; t++) out[t * ld + (r + i - row0)] = sum(acc[i][t]);
    }
}

// ---- Many tokens

// Sixteen rows in groups of four, one lane per row. Per 32-block and group: eight registers of codes, four
// per half block, as `interleave` orders them; then the block's scales.
struct Panel {
    int8_t* codes;       // [blocks][4][8][16]
    float* scale;        // [blocks][16]
    float* min;          // [blocks][16]
    int32_t* sub_scale;  // [blocks][2][16]
    int32_t* sub_min;    // [blocks][2][16]
};

// Transpose four registers of four 4-byte words.
inline void transpose(int32x4_t v[4]) {
    const int64x2_t ab_even = vreinterpretq_s64_s32(vtrn1q_s32(v[0], v[1])),
                    ab_odd = vreinterpretq_s64_s32(vtrn2q_s32(v[0], v[1]));
    const int64x2_t cd_even = vreinterpretq_s64_s32(vtrn1q_s32(v[2], v[3])),
                    cd_odd = vreinterpretq_s64_s32(vtrn2q_s32(v[2], v[3]));
    v[0] = vreinterpretq_s32_s64(vtrn1q_s64(ab_even, cd_even));
    v[1] = vreinterpretq_s32_s64(vtrn1q_s64(ab_odd, cd_odd));
    v[2] = vreinterpretq_s32_s64(vtrn2q_s64(ab_even, cd_even));
    v[3] = vreinterpretq_s32_s64(vtrn2q_s64(ab_odd, cd_odd));
}

// Reorder the sixteen codes of each of four rows for the products of a panel.
inline void interleave(int32x4_t rows[4]) {
#ifdef HOTSET_I8MM  // codes 0 to 7 of two rows per register, then codes 8 to 15
    int64x2_t v[4];
    for (int r = 0; r < 4; r++) v[r] = vreinterpretq_s64_s32(rows[r]);
    rows[0] = vreinterpretq_s32_s64(vtrn1q_s64(v[0], v[1]));
    rows[1] = vreinterpretq_s32_s64(vtrn1q_s64(v[2], v[3]));
    rows[2] = vreinterpretq_s32_s64(vtrn2q_s64(v[0], v[1]));
    rows[3] = vreinterpretq_s32_s64(vtrn2q_s64(v[2], v[3]));
#else
    transpose(rows);  // four codes of each row per register
#endif
}

// Pack blocks b.. b + n of four rows as group `four` of a panel. rows[i] is readable for sixteen blocks.
template <class Format>
inline void pack_four(const uint8_t* const rows[4], int four, int64_t b, int n, const Panel& panel) {
    constexpr bool kMin = has_min(Format::kType), kSub = has_sub_blocks(Format::kType);
    Scales scales[4];
    for (int r = 0; r < 4; r++) scales[r] = Format::scales(rows[r]);
    unroll<4>([&]<int g>() {
        if (4 * g >= n) return;
        const int count = imin(n - 4 * g, 4);
        const int64_t first_block = b + 4 * g;
        int32x4_t words[4][2][4];  // [block][half][row]
        for (int r = 0; r < 4; r++)
            unroll<4>([&]<int j>() {
                int8x16_t a, c;
                Format::template unpack<4 * g + j>(rows[r], a, c);
                words[j][0][r] = vreinterpretq_s32_s8(a);
                words[j][1][r] = vreinterpretq_s32_s8(c);
            });
        for (int j = 0; j < count; j++)
            for (int half = 0; half < 2; half++) {
                int8_t* out = panel.codes + ((first_block + j) * 4 + four) * 128 + half * 64;
                interleave(words[j][half]);
                for (int i = 0; i < 4; i++) vst1q_s8(out + 16 * i, vreinterpretq_s8_s32(words[j][half][i]));
            }
        int32x4_t lanes[4];
        auto place = [&](auto* out, int stride) {
            transpose(lanes);
            for (int j = 0; j < count; j++)
                memcpy(out + (first_block + j) * stride + 4 * four, &lanes[j], 16);
        };
        for (int r = 0; r < 4; r++) lanes[r] = vreinterpretq_s32_f32(scales[r].scale[g]);
        place(panel.scale, 16);
        if constexpr (kMin) {
            for (int r = 0; r < 4; r++) lanes[r] = vreinterpretq_s32_f32(scales[r].min[g]);
            place(panel.min, 16);
        }
        for (int half = 0; kSub && half < 2; half++) {
            for (int r = 0; r < 4; r++) lanes[r] = scales[r].sub_scale[half][g];
            place(panel.sub_scale + 16 * half, 32);
            if constexpr (kMin) {
                for (int r = 0; r < 4; r++) lanes[r] = scales[r].sub_min[half][g];
                place(panel.sub_min + 16 * half, 32);
            }
        }
    });
}

template <class Format>
inline void pack_panel(const Matrix& w, int64_t row, int n_rows, int64_t blocks, const Panel& panel) {
    for (int four = 0; four < 4; four++)
        for (int64_t b = 0; b < blocks; b += 16) {
            const int n = imin(blocks - b, 16);
            alignas(16) uint8_t copies[4][Format::kBytes];
            const uint8_t* rows[4];
            for (int r = 0; r < 4; r++) {  // a short panel repeats its last row
                rows[r] = w.row(row + imin(4 * four + r, n_rows - 1)) + b / 16 * Format::kBytes;
                rows[r] = readable<Format>(rows[r], n, w.end(), copies[r]);
            }
            pack_four<Format>(rows, four, b, n, panel);
        }
}

constexpr int kTokenTile = 4;

// The inputs of one block of T tokens, in the order of a panel's products.
template <int T>
class BlockInputs {
  public:
    BlockInputs(const Token* x, int64_t at) {
        for (int half = 0; half < 2; half++)
#ifdef HOTSET_I8MM
            for (int pair = 0; pair < kPairs; pair++) {
                const int8_t* const other = x[imin(2 * pair + 1, T - 1)].q;
                const int64x2_t v = vreinterpretq_s64_s8(vld1q_s8(x[2 * pair].q + at + 64 * half)),
                                u = vreinterpretq_s64_s8(vld1q_s8(other + at + 64 * half));
                q_[pair][2 * half] = vreinterpretq_s8_s64(vtrn1q_s64(v, u));
                q_[pair][2 * half + 1] = vreinterpretq_s8_s64(vtrn2q_s64(v, u));
            }
#else
            for (int t = 0; t < T; t++) q_[t][half] = vld1q_s8(x[t].q + at + 64 * half);
#endif
    }

    // Compute each token's dot products with four rows, one lane per row, for kCount halves of the block
    // starting at kFirst.
    template <int kFirst, int kCount>
    void multiply(const int8x16_t codes[8], int32x4_t dots[T]) const {
#ifdef HOTSET_I8MM
        for (int pair = 0; pair < kPairs; pair++) {
            int64x2_t sums[2];  // two rows of the first token, then of the second
            for (int rows = 0; rows < 2; rows++) {
                int32x4_t sum = vdupq_n_s32(0);
                for (int i = 2 * kFirst; i < 2 * (kFirst + kCount); i++)
                    sum = vmmlaq_s32(sum, q_[pair][i], codes[2 * i + rows]);
                sums[rows] = vreinterpretq_s64_s32(sum);
            }
            dots[2 * pair] = vreinterpretq_s32_s64(vtrn1q_s64(sums[0], sums[1]));
            if (2 * pair + 1 < T) dots[2 * pair + 1] = vreinterpretq_s32_s64(vtrn2q_s64(sums[0], sums[1]));
        }
#else
        for (int t = 0; t < T; t++) {
            dots[t] = vdupq_n_s32(0);
            for (int half = kFirst; half < kFirst + kCount; half++) {
                dots[t] = vdotq_laneq_s32(dots[t], codes[4 * half], q_[t][half], 0);
                dots[t] = vdotq_laneq_s32(dots[t], codes[4 * half + 1], q_[t][half], 1);
                dots[t] = vdotq_laneq_s32(dots[t], codes[4 * half + 2], q_[t][half], 2);
                dots[t] = vdotq_laneq_s32(dots[t], codes[4 * half + 3], q_[t][half], 3);
            }
        }
#endif
    }

  private:
#ifdef HOTSET_I8MM
    static constexpr int kPairs = (T + 1) / 2;
    int8x16_t q_[kPairs][4];  // eight inputs of each of two tokens; an odd last token is its own partner
#else
    int8x16_t q_[T][2];
#endif
};

template <class Format, int T>
inline void panel_tile(const Panel& panel, int64_t blocks, const Token* x, float (*acc)[kTokenTile][16]) {
    constexpr bool kMin = has_min(Format::kType), kSub = has_sub_blocks(Format::kType);
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t at = half_at(kInterleaved, b, 0);
        const BlockInputs<T> inputs(x, at);
        for (int four = 0; four < 4; four++) {
            int8x16_t codes[8];
            for (int i = 0; i < 8; i++) codes[i] = vld1q_s8(panel.codes + (b * 4 + four) * 128 + i * 16);
            const float32x4_t scale = vld1q_f32(panel.scale + b * 16 + four * 4);
            int32x4_t dots[T], second_dots[T];
            inputs.template multiply<0, kSub ? 1 : 2>(codes, dots);
            if constexpr (kSub) inputs.template multiply<1, 1>(codes, second_dots);
            for (int t = 0; t < T; t++) {
                int32x4_t dot = dots[t];
                if constexpr (kSub) {
                    dot = vmulq_s32(dot, vld1q_s32(panel.sub_scale + b * 32 + four * 4));
                    dot = vmlaq_s32(dot, second_dots[t], vld1q_s32(panel.sub_scale + b * 32 + 16 + four * 4));
                }
                float* lane = acc[b % 16][t] + 4 * four;
                float32x4_t total =
                    vfmaq_f32(vld1q_f32(lane), vmulq_n_f32(scale, x[t].scale[b]), vcvtq_f32_s32(dot));
                if constexpr (kMin) {
                    const float32x4_t min = vld1q_f32(panel.min + b * 16 + four * 4);
                    if constexpr (kSub) {
                        int32x4_t mins =
                            vmulq_n_s32(vld1q_s32(panel.sub_min + b * 32 + four * 4), x[t].isum[0][b]);
                        mins = vmlaq_n_s32(mins, vld1q_s32(panel.sub_min + b * 32 + 16 + four * 4),
                                           x[t].isum[1][b]);
                        total = vfmaq_f32(total, vmulq_n_f32(min, x[t].scale[b]), vcvtq_f32_s32(mins));
                    } else {
                        total = vfmaq_n_f32(total, min, x[t].sum[b]);
                    }
                }
                vst1q_f32(lane, total);
            }
        }
    }
}

template <class Format>
void panels(const Matrix& w, int64_t row0, int64_t row1, const Inputs& x, int t0, int t1, float* out,
            int64_t ld, uint8_t* scratch) {
    const int64_t blocks = x.k / 32;
    auto take = [&](size_t bytes) {
        uint8_t* p = scratch;
        scratch += (bytes + 63) / 64 * 64;
        return p;
    };
    Panel panel[kPanelRows / 16];
    for (Panel& p : panel) {
        p.codes = reinterpret_cast<int8_t*>(take(size_t(blocks) * 512));
        p.scale = reinterpret_cast<float*>(take(size_t(blocks) * 64));
        p.min = reinterpret_cast<float*>(take(size_t(blocks) * 64));
        p.sub_scale = reinterpret_cast<int32_t*>(take(size_t(blocks) * 128));
        p.sub_min = reinterpret_cast<int32_t*>(take(size_t(blocks) * 128));
    }
    for (int64_t r = row0; r < row1; r += kPanelRows) {
        const int n_panels = (imin(row1 - r, kPanelRows) + 15) / 16;
        for (int i = 0; i < n_panels; i++)
            pack_panel<Format>(w, r + 16 * i, imin(row1 - r - 16 * i, 16), blocks, panel[i]);
        for (int t = t0; t < t1; t += kTokenTile) {
            const int n = imin(t1 - t, kTokenTile);
            Token tokens[kTokenTile];
            for (int i = 0; i < n; i++) tokens[i] = Token(x, t + i);
            for (int i = 0; i < n_panels; i++) {
                alignas(64) float acc[16][kTokenTile][16] = {};
                switch (n) {
                    case 1:
                        panel_tile<Format, 1>(panel[i], blocks, tokens, acc);
                        break;
                    case 2:
                        panel_tile<Format, 2>(panel[i], blocks, tokens, acc);
                        break;
                    case 3:
                        panel_tile<Format, 3>(panel[i], blocks, tokens, acc);
                        break;
                    default:
                        panel_tile<Format, 4>(panel[i], blocks, tokens, acc);
                        break;
                }
                const int64_t row = r + 16 * i;
                for (int j = 0; j < n; j++) {
                    V lane[16];
                    for (int l = 0; l < 16; l++) lane[l] = V::load(acc[l][j]);
                    for (int half = 8; half; half /= 2)
                        for (int l = 0; l < half; l++) lane[l] = lane[l] + lane[l + half];
                    lane[0].store_n(out + (t + j - t0) * ld + (row - row0), imin(row1 - row, 16));
                }
            }
        }
    }
}

template <class Format>
void linear(const Matrix& w, int64_t row0, int64_t row1, const Inputs& x, int t0, int t1, float* out,
            int64_t ld, uint8_t* scratch) {
    if (t1 - t0 > kFewTokens) return panels<Format>(w, row0, row1, x, t0, t1, out, ld, scratch);
#ifdef HOTSET_I8MM
    return neon_kernels()->linear[int(Format::kType)](w, row0, row1, x, t0, t1, out, ld, scratch);
#else
    if (t1 - t0 > 1) return few<Format>(w, row0, row1, x, t0, t1 - t0, out, ld);
    const Token token(x, t0);
    for (int64_t r = row0; r < row1; r++)
        out[r - row0] = dot<Format>(w.row(r), nullptr, w.end(), x.k / 32, token);
#endif
}

template <class Format>
inline float one_row(const Matrix& w, const uint8_t* row, const Inputs& x, int t, const uint8_t* ahead) {
    return dot<Format>(row, ahead, w.end(), x.k / 32, Token(x, t));
}

// Decode the scales of n blocks of kStride bytes that begin with an f16 scale.
template <int kStride>
inline void block_scales(const uint8_t* p, int n, const uint8_t*, float* out) {
    for (int i = 0; i < n; i++) out[i] = load_f16(p + i * kStride);
}

#include "sparse_kernels.h"
#include "channels_neon.h"
#include "channel_kernels.h"
#include "format_table.h"
#include "encode_kernels.h"
#include "codebook_encoders.h"

}  // namespace

namespace hotset {

#ifdef HOTSET_I8MM
const Kernels* i8mm_kernels() {
    static const Kernels table = [] {
        using namespace i8mm;
        Kernels t = *neon_kernels();
        t.isa = "i8mm";
        for_formats([&t]<class Format>() { t.linear[int(Format::kType)] = linear<Format>; });
        return t;
    }();
    return &table;
}
#else
const Kernels* neon_kernels() {
    static const Kernels table = [] {
        using namespace neon;
        Kernels t = float_kernel_table("neon");
        add_formats(t);
        add_sparse_kernels(t);
        add_encoders(t);
        add_codebook_encoders(t);
        add_channel_kernels(t);
        return t;
    }();
    return &table;
}
#endif

}  // namespace hotset
