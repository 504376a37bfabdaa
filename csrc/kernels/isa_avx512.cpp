// AVX-512 (F, BW, DQ, VL, VNNI). A vector holds halves of four 32-blocks: four int32 lanes per block after
// dpbusd.
//
// One token: sixteen blocks per step, whose dot products are transposed into one vector, one lane per block.
// Many tokens: sixteen rows are packed into a panel whose lanes are rows, so that the transpose is done once.
#include <immintrin.h>

#include <bit>
#include <memory>
#include <utility>

#include "codebooks.h"
#include "kernels.h"
#include "tiles.h"

namespace hotset::avx512 {

#include "blocks.h"
#include "simd_avx512.h"
#include "float_kernels.h"

inline float half(uint16_t bits) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}

// Scales of up to sixteen blocks of one row, one lane per block.
struct Scales {
    __m512 scale;
    __m512 min;
    __m512i sub_scale[2];
    __m512i sub_min[2];
};

inline __m128i load128(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline __m512i four_lanes(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
    __m512i v = _mm512_castsi128_si512(load128(a));
    v = _mm512_inserti32x4(v, load128(b), 1);
    v = _mm512_inserti32x4(v, load128(c), 2);
    return _mm512_inserti32x4(v, load128(d), 3);
}

inline __m512i broadcast16(const uint8_t* p) {
    return _mm512_broadcast_i32x4(load128(p));
}

inline __m512i low_nibbles(__m512i v) {
    return _mm512_and_si512(v, _mm512_set1_epi8(15));
}
inline __m512i high_nibbles(__m512i v) {
    return low_nibbles(_mm512_srli_epi16(v, 4));
}

// Indices with which a permutation of two registers (128 bytes from block `first` on) finds the head of each
// of sixteen blocks.
template <class Word>
struct HeadIndex {
    alignas(64) Word lane[64 / sizeof(Word)] = {};

    constexpr HeadIndex(int stride, int first) {
        for (int i = 0; i < 16; i++) lane[i] = i < first ? 0 : Word((i - first) * stride / int(sizeof(Word)));
    }
};

// Types with 32-blocks of kStride bytes: an f16 scale at the beginning of each, followed by an f16 minimum if
// kMin. Permutations of two registers gather sixteen heads, as many blocks at a time as fit in 128 bytes.
template <int kStride, bool kMin>
struct HeadScales {
    static constexpr int kWord = kMin ? 4 : 2;
    static constexpr int kAtOnce = (128 - kWord) / kStride + 1;

    template <int kFirst>
    static __m512i heads(const uint8_t* p, int n) {
        const __m512i low = _mm512_loadu_si512(p + kFirst * kStride),
                      high = _mm512_loadu_si512(p + kFirst * kStride + 64);
        __m512i found;
        if constexpr (kMin) {
            static constexpr HeadIndex<int32_t> kIndex(kStride, kFirst);
            const __mmask16 lanes = __mmask16(((1u << kAtOnce) - 1) << kFirst);
            found = _mm512_maskz_permutex2var_epi32(lanes, low, _mm512_load_si512(kIndex.lane), high);
        } else {
            static constexpr HeadIndex<int16_t> kIndex(kStride, kFirst);
            const __mmask32 lanes = __mmask32(((uint64_t(1) << kAtOnce) - 1) << kFirst) & 0xffff;
            found = _mm512_maskz_permutex2var_epi16(lanes, low, _mm512_load_si512(kIndex.lane), high);
        }
        if constexpr (kFirst + kAtOnce < 16) {
            if (n > kFirst + kAtOnce) found = _mm512_or_si512(found, heads<kFirst + kAtOnce>(p, n));
        }
        return found;
    }

    static Scales scales(const uint8_t* p, int n) {
        Scales s;
        if constexpr (kMin) {
            const __m512i words = heads<0>(p, n);
            s.scale = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words));
            s.min = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16)));
        } else if constexpr (kAtOnce > 4) {
            s.scale = _mm512_cvtph_ps(_mm512_castsi512_si256(heads<0>(p, n)));
        } else {  // for such long blocks sixteen loads are faster
            alignas(32) uint16_t halves[16];
            for (int i = 0; i < n; i++) halves[i] = load_u16(p + i * kStride);
            s.scale = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(halves)));
        }
        return s;
    }
};

// Each format has kBytes of sixteen blocks; kZero, the offset of its codes; unpack(p, g, a, b) for the codes
// (bytes) of blocks 4g..4g+3 at p: first halves into a, second halves into b.

// A type without instructions of its own: each block as blocks.h decodes it.
template <Type kOf>
struct Format {
    static_assert(!has_min(kOf) && !has_sub_blocks(kOf));
    static constexpr Type kType = kOf;
    static constexpr int kZero = 128;
    static constexpr int kBytes = 512 / type_facts(kOf).block_size * type_facts(kOf).block_bytes;

    static void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        alignas(64) uint8_t codes[2][64];
        for (int lane = 0; lane < 4; lane++) {
            const Block32 block = decode_block(kType, p, 4 * g + lane);
            for (int i = 0; i < 32; i++) codes[i / 16][16 * lane + i % 16] = uint8_t(block.q[i] + kZero);
        }
        a = _mm512_load_si512(codes[0]);
        b = _mm512_load_si512(codes[1]);
    }
    static Scales scales(const uint8_t* p, int n) {
        alignas(64) float scale[16] = {};
        for (int i = 0; i < n; i++) scale[i] = decode_block(kType, p, i).scale;
        Scales out;
        out.scale = _mm512_load_ps(scale);
        return out;
    }
};

template <int kHead, int kBlockBytes, bool kMin>
struct Nibbles : HeadScales<kBlockBytes, kMin> {
    static constexpr int kBytes = 16 * kBlockBytes;
    static void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        const uint8_t* at = p + 4 * g * kBlockBytes + kHead;
        const __m512i codes = four_lanes(at, at + kBlockBytes, at + 2 * kBlockBytes, at + 3 * kBlockBytes);
        a = low_nibbles(codes);
        b = high_nibbles(codes);
    }
};

template <>
struct Format<Type::Q4_0> : Nibbles<2, 18, false> {
    static constexpr Type kType = Type::Q4_0;
    static constexpr int kZero = 8;
};

template <>
struct Format<Type::Q4_1> : Nibbles<4, 20, true> {
    static constexpr Type kType = Type::Q4_1;
    static constexpr int kZero = 0;
};

template <int kHead, int kBlockBytes, bool kMin>
struct FiveBits : HeadScales<kBlockBytes, kMin> {
    static constexpr int kBytes = 16 * kBlockBytes;
    static void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        const uint8_t* at = p + 4 * g * kBlockBytes + kHead + 4;
        const __m512i codes = four_lanes(at, at + kBlockBytes, at + 2 * kBlockBytes, at + 3 * kBlockBytes);
        uint64_t first = 0, second = 0;
        for (int j = 0; j < 4; j++) {
            const uint64_t bits = load_u32(at - 4 + j * kBlockBytes);
            first |= (bits & 0xffff) << (16 * j);
            second |= (bits >> 16) << (16 * j);
        }
        const __m512i sixteen = _mm512_set1_epi8(16);
        const __m512i low = low_nibbles(codes), high = high_nibbles(codes);
        a = _mm512_mask_add_epi8(low, first, low, sixteen);
        b = _mm512_mask_add_epi8(high, second, high, sixteen);
    }
};

template <>
struct Format<Type::Q5_0> : FiveBits<2, 22, false> {
    static constexpr Type kType = Type::Q5_0;
    static constexpr int kZero = 16;
};

template <>
struct Format<Type::Q5_1> : FiveBits<4, 24, true> {
    static constexpr Type kType = Type::Q5_1;
    static constexpr int kZero = 0;
};

template <>
struct Format<Type::Q8_0> : HeadScales<34, false> {
    static constexpr Type kType = Type::Q8_0;
    static constexpr int kZero = 128;
    static constexpr int kBytes = 16 * 34;
    static void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        const uint8_t* at = p + 4 * g * 34 + 2;
        const __m512i offset = _mm512_set1_epi8(int8_t(0x80));
        a = _mm512_xor_si512(four_lanes(at, at + 34, at + 68, at + 102), offset);
        b = _mm512_xor_si512(four_lanes(at + 16, at + 50, at + 84, at + 118), offset);
    }
};

// The table of IQ4 values, offset by 128 to be unsigned.
inline __m512i iq4_codes(__m512i nibbles) {
    alignas(16) static constexpr uint8_t kOffset[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                        129, 141, 153, 166, 181, 197, 217, 241};
    return _mm512_shuffle_epi8(broadcast16(kOffset), nibbles);
}

template <>
struct Format<Type::IQ4_NL> : Nibbles<2, 18, false> {
    static constexpr Type kType = Type::IQ4_NL;
    static constexpr int kZero = 128;
    static void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        Nibbles::unpack(p, g, a, b);
        a = iq4_codes(a);
        b = iq4_codes(b);
    }
};

template <>
struct Format<Type::MXFP4> {
    static constexpr Type kType = Type::MXFP4;
    static constexpr int kZero = 16;
    static constexpr int kBlockBytes = 17, kBytes = 16 * kBlockBytes;

    static __m512i codes(__m512i nibbles) {
        alignas(16) static constexpr uint8_t kOffset[16] = {16, 17, 18, 19, 20, 22, 24, 28,
                                                            16, 15, 14, 13, 12, 10, 8,  4};
        return _mm512_shuffle_epi8(broadcast16(kOffset), nibbles);
    }
    static void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        const uint8_t* at = p + 4 * g * kBlockBytes + 1;
        const __m512i packed = four_lanes(at, at + kBlockBytes, at + 2 * kBlockBytes, at + 3 * kBlockBytes);
        a = codes(low_nibbles(packed));
        b = codes(high_nibbles(packed));
    }
    static Scales scales(const uint8_t* p, int n) {
        // Every other block begins at an odd byte: its exponent is the high byte of the word found there.
        const __m256i words = _mm512_castsi512_si256(HeadScales<kBlockBytes, false>::heads<0>(p, n));
        const __m256i bytes =
            _mm256_and_si256(_mm256_srlv_epi16(words, _mm256_set1_epi32(8 << 16)), _mm256_set1_epi16(255));
        const __m512i e = _mm512_cvtepu16_epi32(bytes);
        const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
        const __mmask16 tiny = _mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2));
        Scales s;
        s.scale = _mm512_castsi512_ps(_mm512_mask_sllv_epi32(normal, tiny, _mm512_set1_epi32(1 << 21), e));
        return s;
    }
};

// Types with super-blocks of 256: sixteen 32-blocks are two of them. n > 8: the second exists.
template <int kSuperBytes, class F>
inline void for_super_blocks(const uint8_t* p, int n, F f) {
    f(p, 0);
    if (n > 8) f(p + kSuperBytes, 8);
}

inline __m512 two_halves(float a, float b) {
    return _mm512_insertf32x8(_mm512_set1_ps(a), _mm256_set1_ps(b), 1);
}

template <>
struct Format<Type::IQ4_XS> {
    static constexpr Type kType = Type::IQ4_XS;
    static constexpr int kZero = 128;
    static constexpr int kBytes = 2 * 136;
    static void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        const __m512i codes = _mm512_loadu_si512(p + g / 2 * 136 + 8 + g % 2 * 64);
        a = iq4_codes(low_nibbles(codes));
        b = iq4_codes(high_nibbles(codes));
    }
    static Scales scales(const uint8_t* p, int n) {
        alignas(64) int32_t sub[16] = {};
        float d[2] = {0, 0};
        for_super_blocks<136>(p, n, [&](const uint8_t* s, int at) {
            d[at / 8] = half(load_u16(s));
            const uint32_t low = load_u32(s + 4), high = load_u16(s + 2);
            for (int j = 0; j < 8; j++)
                sub[at + j] = int((low >> (4 * j) & 15) | (high >> (2 * j) & 3) << 4) - 32;
        });
        Scales out;
        out.scale = _mm512_mul_ps(two_halves(d[0], d[1]), _mm512_cvtepi32_ps(_mm512_load_si512(sub)));
        return out;
    }
};

// Q4_K and Q5_K: both super-blocks in one lane each, even if the second is missing. Its lanes are then
// masked, and kSlack allows the read.
template <int kSuperBytes>
struct KScales {
    static Scales scales(const uint8_t* p, int) { return scales_of_two(p, p + kSuperBytes); }
    static Scales scales_of_two(const uint8_t* p, const uint8_t* q) {
        const __m128i first = load128(p), second = load128(q);  // f16 d, f16 dmin, 3 words
        const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
        // Words 0 and 2 (minimums: 1 and 2) hold the low bits, the upper two bits of words 0 and 1 the high.
        const __m256i low_of = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15));
        const __m256i high_of = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(-1, -1, -1, -1, 4, 5, 6, 7, -1, -1, -1, -1, 8, 9, 10, 11));
        const __m256i low = _mm256_and_si256(
            _mm256_srlv_epi32(_mm256_shuffle_epi8(both, low_of), _mm256_setr_epi32(0, 0, 0, 4, 0, 0, 0, 4)),
            _mm256_set1_epi64x(0x0f0f0f0f3f3f3f3f));
        const __m256i high = _mm256_and_si256(_mm256_srli_epi32(_mm256_shuffle_epi8(both, high_of), 2),
                                              _mm256_set1_epi8(0x30));
        // The scales of both, then the minimums of both.
        const __m256i bytes = _mm256_permute4x64_epi64(_mm256_or_si256(low, high), 0xd8);
        const __m128 d = _mm_xor_ps(_mm_cvtph_ps(_mm_unpacklo_epi32(first, second)),
                                    _mm_setr_ps(0.0f, -0.0f, 0.0f, -0.0f));  // d, -dmin of each
        const __m512 all = _mm512_castps128_ps512(d);
        auto of = [all](int place, __m128i sub) {
            const __m512i lanes =
                _mm512_inserti64x4(_mm512_set1_epi32(place), _mm256_set1_epi32(place + 2), 1);
            return _mm512_mul_ps(_mm512_permutexvar_ps(lanes, all),
                                 _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sub)));
        };
        Scales out;
        out.scale = of(0, _mm256_castsi256_si128(bytes));
        out.min = of(1, _mm256_extracti128_si256(bytes, 1));
        return out;
    }
};

// Unpack 64 bytes of codes (two blocks in the nibbles of 32 bytes) into halves of four blocks.
inline void unpack_nibble_pairs(__m512i codes, __m512i& a, __m512i& b) {
    const __m512i low = low_nibbles(codes),
                  high = high_nibbles(codes);  // lanes: b0a b0b b2a b2b; b1a b1b b3a b3b
    const __m512i even = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13),
                  odd = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    a = _mm512_permutex2var_epi64(low, even, high);
    b = _mm512_permutex2var_epi64(low, odd, high);
}

template <>
struct Format<Type::Q4_K> : KScales<144> {
    static constexpr Type kType = Type::Q4_K;
    static constexpr int kZero = 0;
    static constexpr int kBytes = 2 * 144;
    static void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        unpack_nibble_pairs(_mm512_loadu_si512(p + g / 2 * 144 + 16 + g % 2 * 64), a, b);
    }
};

// Move bit (first + lane * step) of each byte in each 128-bit lane to bit 0.
inline __m512i lane_bits(__m512i bytes, int first, int step, int mask) {
    const __m512i lane =
        _mm512_setr_epi64(0x0000000000000000, 0x0000000000000000, 0x0001000100010001, 0x0001000100010001,
                          0x0002000200020002, 0x0002000200020002, 0x0003000300030003, 0x0003000300030003);
    const __m512i shift =
        _mm512_add_epi16(_mm512_set1_epi16(int16_t(first)), step == 2 ? _mm512_add_epi16(lane, lane) : lane);
    return _mm512_and_si512(_mm512_srlv_epi16(bytes, shift), _mm512_set1_epi8(int8_t(mask)));
}

template <>
struct Format<Type::Q5_K> : KScales<176> {
    static constexpr Type kType = Type::Q5_K;
    static constexpr int kZero = 0;
    static constexpr int kBytes = 2 * 176;
    static void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        const uint8_t* s = p + g / 2 * 176;
        unpack_nibble_pairs(_mm512_loadu_si512(s + 48 + g % 2 * 64), a, b);
        const int first = g % 2 * 4;
        a = _mm512_or_si512(a, _mm512_slli_epi16(lane_bits(broadcast16(s + 16), first, 1, 1), 4));
        b = _mm512_or_si512(b, _mm512_slli_epi16(lane_bits(broadcast16(s + 32), first, 1, 1), 4));
    }
};

// Split sixteen int8 or uint8 sub-scales per super-block, widened to int32, into first and second halves.
inline void split_pairs(__m512i first_super, __m512i second_super, __m512i out[2]) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    out[0] = _mm512_permutex2var_epi32(first_super, even, second_super);
    out[1] = _mm512_permutex2var_epi32(first_super, odd, second_super);
}

template <>
struct Format<Type::Q6_K> {
    static constexpr Type kType = Type::Q6_K;
    static constexpr int kZero = 32;
    static constexpr int kBytes = 2 * 210;
    static void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        const uint8_t* s = p + g / 2 * 210;
        const uint8_t* low = s + g % 2 * 64;
        const uint8_t* high = s + 128 + g % 2 * 32;
        // Lanes: bytes 0..15, 32..47 (low nibbles), the same again (high nibbles).
        const __m512i codes_a = four_lanes(low, low + 32, low, low + 32);
        const __m512i codes_b = four_lanes(low + 16, low + 48, low + 16, low + 48);
        const __m512i shift = _mm512_setr_epi64(0, 0, 0, 0, 0x0004000400040004, 0x0004000400040004,
                                                0x0004000400040004, 0x0004000400040004);
        a = low_nibbles(_mm512_srlv_epi16(codes_a, shift));
        b = low_nibbles(_mm512_srlv_epi16(codes_b, shift));
        a = _mm512_or_si512(a, _mm512_slli_epi16(lane_bits(broadcast16(high), 0, 2, 3), 4));
        b = _mm512_or_si512(b, _mm512_slli_epi16(lane_bits(broadcast16(high + 16), 0, 2, 3), 4));
    }
    static Scales scales(const uint8_t* p, int n) {
        __m512i sub[2] = {};
        float d[2] = {0, 0};
        for_super_blocks<210>(p, n, [&](const uint8_t* s, int at) {
            d[at / 8] = half(load_u16(s + 208));
            sub[at / 8] = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(s + 192)));
        });
        Scales out;
        out.scale = two_halves(d[0], d[1]);
        split_pairs(sub[0], sub[1], out.sub_scale);
        return out;
    }
};

template <>
struct Format<Type::Q3_K> {
    static constexpr Type kType = Type::Q3_K;
    static constexpr int kZero = 4;
    static constexpr int kBytes = 2 * 110;
    static void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        const uint8_t* s = p + g / 2 * 110;
        const uint8_t* codes = s + 32 + g % 2 * 32;
        const int first = g % 2 * 4;
        a = lane_bits(broadcast16(codes), 0, 2, 3);
        b = lane_bits(broadcast16(codes + 16), 0, 2, 3);
        a = _mm512_or_si512(a, _mm512_slli_epi16(lane_bits(broadcast16(s), first, 1, 1), 2));
        b = _mm512_or_si512(b, _mm512_slli_epi16(lane_bits(broadcast16(s + 16), first, 1, 1), 2));
    }
    static Scales scales(const uint8_t* p, int n) {
        __m512i sub[2] = {};
        float d[2] = {0, 0};
        for_super_blocks<110>(p, n, [&](const uint8_t* s, int at) {
            d[at / 8] = half(load_u16(s + 108));
            const uint32_t w0 = load_u32(s + 96), w1 = load_u32(s + 100), w2 = load_u32(s + 104);
            const __m128i bytes = _mm_set_epi32(int((w1 >> 4 & 0x0f0f0f0f) | (w2 >> 2 & 0x30303030)),
                                                int((w0 >> 4 & 0x0f0f0f0f) | (w2 & 0x30303030)),
                                                int((w1 & 0x0f0f0f0f) | (w2 << 2 & 0x30303030)),
                                                int((w0 & 0x0f0f0f0f) | (w2 << 4 & 0x30303030)));
            sub[at / 8] = _mm512_sub_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(32));
        });
        Scales out;
        out.scale = two_halves(d[0], d[1]);
        split_pairs(sub[0], sub[1], out.sub_scale);
        return out;
    }
};

template <>
struct Format<Type::Q2_K> {
    static constexpr Type kType = Type::Q2_K;
    static constexpr int kZero = 0;
    static constexpr int kBytes = 2 * 84;
    static void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        const uint8_t* codes = p + g / 2 * 84 + 16 + g % 2 * 32;
        a = lane_bits(broadcast16(codes), 0, 2, 3);
        b = lane_bits(broadcast16(codes + 16), 0, 2, 3);
    }
    static Scales scales(const uint8_t* p, int n) {
        __m512i sub[2] = {}, min[2] = {};
        float d[2] = {0, 0}, dmin[2] = {0, 0};
        for_super_blocks<84>(p, n, [&](const uint8_t* s, int at) {
            d[at / 8] = half(load_u16(s + 80));
            dmin[at / 8] = -half(load_u16(s + 82));
            const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(s)));
            sub[at / 8] = _mm512_and_si512(bytes, _mm512_set1_epi32(15));
            min[at / 8] = _mm512_srli_epi32(bytes, 4);
        });
        Scales out;
        out.scale = two_halves(d[0], d[1]);
        out.min = two_halves(dmin[0], dmin[1]);
        split_pairs(sub[0], sub[1], out.sub_scale);
        split_pairs(min[0], min[1], out.sub_min);
        return out;
    }
};

// Ternary types: codes 0 to 2.

template <>
struct Format<Type::TQ2_0> {
    static constexpr Type kType = Type::TQ2_0;
    static constexpr int kZero = 1;
    static constexpr int kBytes = 2 * 66;
    static void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        const uint8_t* codes = p + g / 2 * 66 + g % 2 * 32;
        a = lane_bits(broadcast16(codes), 0, 2, 3);
        b = lane_bits(broadcast16(codes + 16), 0, 2, 3);
    }
    static Scales scales(const uint8_t* p, int n) {
        Scales out;
        out.scale = two_halves(half(load_u16(p + 64)), n > 8 ? half(load_u16(p + 66 + 64)) : 0.0f);
        return out;
    }
};

template <>
struct Format<Type::TQ1_0> {
    static constexpr Type kType = Type::TQ1_0;
    static constexpr int kZero = 1;
    static constexpr int kBytes = 2 * 54;

    // Multiply bytes by powers of three modulo 256; return the fractions' first base-3 digit.
    static __m512i digits(__m512i bytes, __m512i powers) {
        const __m512i low = _mm512_set1_epi16(255);
        const __m512i even = _mm512_mullo_epi16(bytes, powers);
        const __m512i odd = _mm512_mullo_epi16(_mm512_andnot_si512(low, bytes), powers);
        const __m512i x = _mm512_ternarylogic_epi32(low, even, odd, 0xca);  // low ? even : odd
        const __m512i one = _mm512_set1_epi8(1);
        const __m512i digit =
            _mm512_maskz_mov_epi8(_mm512_cmpge_epu8_mask(x, _mm512_set1_epi8(86)), one);  // 256 / 3
        const __mmask64 two = _mm512_cmpge_epu8_mask(x, _mm512_set1_epi8(int8_t(171)));   // 512 / 3
        return _mm512_mask_add_epi8(digit, two, digit, one);
    }
    static __m512i lane_powers(int a, int b, int c, int d) {
        const __m256i low = _mm256_set_m128i(_mm_set1_epi16(int16_t(b)), _mm_set1_epi16(int16_t(a)));
        const __m256i high = _mm256_set_m128i(_mm_set1_epi16(int16_t(d)), _mm_set1_epi16(int16_t(c)));
        return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
    static void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        const uint8_t* s = p + g / 2 * 54;
        if (g % 2 == 0) {
            const __m512i powers = lane_powers(1, 3, 9, 27);
            a = digits(broadcast16(s), powers);
            b = digits(broadcast16(s + 16), powers);
            return;
        }
        a = digits(four_lanes(s, s + 32, s + 32, s + 32), lane_powers(81, 1, 9, 81));
        const __m128i last = _mm_set1_epi32(int(load_u32(s + 48)));
        const __m512i four_digits = _mm512_inserti32x4(
            lane_powers(81, 3, 27, 0), _mm_setr_epi32(0x10001, 0x30003, 0x90009, 0x1b001b), 3);
        b = digits(_mm512_inserti32x4(four_lanes(s + 16, s + 32, s + 32, s + 32), last, 3), four_digits);
    }
    static Scales scales(const uint8_t* p, int n) {
        Scales out;
        out.scale = two_halves(half(load_u16(p + 52)), n > 8 ? half(load_u16(p + 54 + 52)) : 0.0f);
        return out;
    }
};

// Lattices: codebook groups are looked up one by one and combined; then signs, one bit per weight.

// Sixteen indices in general registers, four each.
struct Indices {
    uint64_t four[4];

    HOTSET_INLINE explicit Indices(__m256i v) {
        const __m128i low = _mm256_castsi256_si128(v), high = _mm256_extracti128_si256(v, 1);
        four[0] = uint64_t(_mm_cvtsi128_si64(low));
        four[1] = uint64_t(_mm_extract_epi64(low, 1));
        four[2] = uint64_t(_mm_cvtsi128_si64(high));
        four[3] = uint64_t(_mm_extract_epi64(high, 1));
#ifndef _MSC_VER  // keeps compilers from extracting each index from the vector
        asm("" : "+r"(four[0]), "+r"(four[1]), "+r"(four[2]), "+r"(four[3]));
#endif
    }
    HOTSET_INLINE int operator()(int i) const { return uint16_t(four[i / 4] >> (16 * (i % 4))); }
};

// Combine sixteen groups of eight weights into the first halves, and the second halves, of four blocks. Uses
// loads and unpacking: the insertions that compilers generate from a list of words are slower.
template <class Book, class Index>
HOTSET_INLINE void look_up(const Book& book, const Index& index, __m512i& a, __m512i& b) {
    auto one = [&](int i) {
        return _mm_castpd_si128(_mm_load_sd(reinterpret_cast<const double*>(book.group + index(i))));
    };
    auto two = [&](int i) { return _mm_unpacklo_epi64(one(i), one(i + 1)); };
    auto eight = [&](int i) {
        const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(two(i)), two(i + 4), 1);
        const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(two(i + 8)), two(i + 12), 1);
        return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    };
    a = eight(0);
    b = eight(2);
}

// The same with 32 groups of four weights.
template <class Book, class Index>
HOTSET_INLINE void look_up_fours(const Book& book, const Index& index, __m512i& a, __m512i& b) {
    auto one = [&](int i) {
        return _mm_castps_si128(_mm_load_ss(reinterpret_cast<const float*>(book.group + index(i))));
    };
    auto four = [&](int i) {
        return _mm_unpacklo_epi64(_mm_unpacklo_epi32(one(i), one(i + 1)),
                                  _mm_unpacklo_epi32(one(i + 2), one(i + 3)));
    };
    auto sixteen = [&](int i) {
        const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(four(i)), four(i + 8), 1);
        const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(four(i + 16)), four(i + 24), 1);
        return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    };
    a = sixteen(0);
    b = sixteen(4);
}

// Compute kZero plus the weights of four blocks, negative where a bit of `signs` (32 per block) is set.
template <int kZero>
HOTSET_INLINE void put_signs(__m128i signs, __m512i& a, __m512i& b) {
    const __m128i halves =
        _mm_shuffle_epi8(signs, _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const __m512i zero = _mm512_set1_epi8(kZero);
    const __mmask64 first = _cvtu64_mask64(uint64_t(_mm_cvtsi128_si64(halves)));
    const __mmask64 second = _cvtu64_mask64(uint64_t(_mm_extract_epi64(halves, 1)));
    a = _mm512_mask_sub_epi8(_mm512_add_epi8(a, zero), first, zero, a);
    b = _mm512_mask_sub_epi8(_mm512_add_epi8(b, zero), second, zero, b);
}

// Add the eighth sign to bytes of seven signs, which makes the number of negative ones even.
inline __m128i eighth_signs(__m128i seven) {
    const __m128i odd = _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0);
    const __m128i nibble = _mm_set1_epi8(15);
    const __m128i low = _mm_shuffle_epi8(odd, _mm_and_si128(seven, nibble));
    const __m128i high = _mm_shuffle_epi8(odd, _mm_and_si128(_mm_srli_epi16(seven, 4), nibble));
    return _mm_xor_si128(seven, _mm_xor_si128(low, high));
}

// Return the signs of four blocks from words of four times seven signs.
inline __m128i signs_of_words(__m128i words) {
    const __m128i mask = _mm_set1_epi32(0x7f);
    const __m128i low = _mm_or_si128(_mm_and_si128(words, mask),
                                     _mm_and_si128(_mm_slli_epi32(words, 1), _mm_slli_epi32(mask, 8)));
    const __m128i high = _mm_or_si128(_mm_and_si128(_mm_slli_epi32(words, 2), _mm_slli_epi32(mask, 16)),
                                      _mm_and_si128(_mm_slli_epi32(words, 3), _mm_slli_epi32(mask, 24)));
    return eighth_signs(_mm_or_si128(low, high));
}

inline __m256i load256(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline __m128i load64(const uint8_t* p) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
}

// Return 2s + 1 for integers s.
inline __m512i odd_scales(__m512i s) {
    return _mm512_add_epi32(_mm512_add_epi32(s, s), _mm512_set1_epi32(1));
}

// Return eight scales of each of up to two super-blocks, kBytes apart, in units of kUnit * d. `steps` reads
// them from one super-block as int32.
template <int kBytes, class Steps>
inline Scales lattice_scales(const uint8_t* p, int n, float unit, Steps steps) {
    __m256i s[2] = {};
    float d[2] = {0, 0};
    for_super_blocks<kBytes>(p, n, [&](const uint8_t* super, int at) {
        d[at / 8] = half(load_u16(super)) * unit;
        s[at / 8] = steps(super);
    });
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(s[0]), s[1], 1);
    Scales out;
    out.scale = _mm512_mul_ps(two_halves(d[0], d[1]), _mm512_cvtepi32_ps(odd_scales(both)));
    return out;
}

// The same for scales of sixteen weights, stored as nibbles at kAt.
template <int kBytes, int kAt>
inline Scales lattice_sub_scales(const uint8_t* p, int n) {
    const __m128i bytes =
        n > 8 ? _mm_unpacklo_epi64(load64(p + kAt), load64(p + kBytes + kAt)) : load64(p + kAt);
    const __m512i wide = _mm512_cvtepu8_epi32(bytes);
    Scales out;
    out.scale = two_halves(half(load_u16(p)) * 0.125f, n > 8 ? half(load_u16(p + kBytes)) * 0.125f : 0.0f);
    out.sub_scale[0] = odd_scales(_mm512_and_si512(wide, _mm512_set1_epi32(15)));
    out.sub_scale[1] = odd_scales(_mm512_srli_epi32(wide, 4));
    return out;
}

template <>
struct Format<Type::IQ2_XXS> {
    static constexpr Type kType = Type::IQ2_XXS;
    static constexpr int kZero = 64;
    static constexpr int kBytes = 2 * 66;
    static HOTSET_INLINE void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        const uint8_t* s = p + g / 2 * 66 + 2 + g % 2 * 32;
        look_up(kIq2Xxs, [s](int i) { return s[i / 4 * 8 + i % 4]; }, a, b);
        put_signs<kZero>(signs_of_words(_mm256_cvtepi64_epi32(_mm256_srli_epi64(load256(s), 32))), a, b);
    }
    static Scales scales(const uint8_t* p, int n) {
        return lattice_scales<66>(p, n, 0.125f, [](const uint8_t* s) {
            return _mm512_cvtepi64_epi32(_mm512_srli_epi64(_mm512_loadu_si512(s + 2), 60));
        });
    }
};

template <>
struct Format<Type::IQ2_XS> {
    static constexpr Type kType = Type::IQ2_XS;
    static constexpr int kZero = 64;
    static constexpr int kBytes = 2 * 74;
    static HOTSET_INLINE void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        const uint8_t* s = p + g / 2 * 74 + 2 + g % 2 * 32;
        look_up(kIq2Xs, [s](int i) { return load_u16(s + 2 * i) & 511; }, a, b);
        put_signs<kZero>(eighth_signs(_mm256_cvtepi16_epi8(_mm256_srli_epi16(load256(s), 9))), a, b);
    }
    static Scales scales(const uint8_t* p, int n) { return lattice_sub_scales<74, 66>(p, n); }
};

template <>
struct Format<Type::IQ2_S> {
    static constexpr Type kType = Type::IQ2_S;
    static constexpr int kZero = 64;
    static constexpr int kBytes = 2 * 82;
    static HOTSET_INLINE void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        const uint8_t* s = p + g / 2 * 82;
        // Repeat each byte of high bits four times, and shift them to bits 8 and 9.
        const __m256i high = _mm256_cvtepu8_epi16(
            _mm_shuffle_epi8(_mm_cvtsi32_si128(int(load_u32(s + 66 + g % 2 * 4))),
                             _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)));
        const __m256i moved = _mm256_sllv_epi16(high, _mm256_set1_epi64x(0x0002000400060008));
        look_up(kIq2S,
                Indices(_mm256_or_si256(_mm256_cvtepu8_epi16(load128(s + 2 + g % 2 * 16)),
                                        _mm256_and_si256(moved, _mm256_set1_epi16(0x300)))),
                a, b);
        put_signs<kZero>(load128(s + 34 + g % 2 * 16), a, b);
    }
    static Scales scales(const uint8_t* p, int n) { return lattice_sub_scales<82, 74>(p, n); }
};

template <>
struct Format<Type::IQ3_XXS> {
    static constexpr Type kType = Type::IQ3_XXS;
    static constexpr int kZero = 64;
    static constexpr int kBytes = 2 * 98;
    static HOTSET_INLINE void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        const uint8_t* s = p + g / 2 * 98;
        const uint8_t* index = s + 2 + g % 2 * 32;
        look_up_fours(kIq3Xxs, [index](int i) { return index[i]; }, a, b);
        put_signs<kZero>(signs_of_words(load128(s + 66 + g % 2 * 16)), a, b);
    }
    static Scales scales(const uint8_t* p, int n) {
        return lattice_scales<98>(p, n, 0.25f,
                                  [](const uint8_t* s) { return _mm256_srli_epi32(load256(s + 66), 28); });
    }
};

template <>
struct Format<Type::IQ3_S> {
    static constexpr Type kType = Type::IQ3_S;
    static constexpr int kZero = 16;
    static constexpr int kBytes = 2 * 110;
    static HOTSET_INLINE void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        const uint8_t* s = p + g / 2 * 110;
        const __m512i low = _mm512_cvtepu8_epi16(load256(s + 2 + g % 2 * 32));
        const __mmask32 high = _cvtu32_mask32(load_u32(s + 66 + g % 2 * 4));
        const __m512i index = _mm512_mask_add_epi16(low, high, low, _mm512_set1_epi16(256));
        const Indices first(_mm512_castsi512_si256(index)), second(_mm512_extracti64x4_epi64(index, 1));
        look_up_fours(kIq3S, [&](int i) { return i < 16 ? first(i) : second(i - 16); }, a, b);
        put_signs<kZero>(load128(s + 74 + g % 2 * 16), a, b);
    }
    static Scales scales(const uint8_t* p, int n) {
        return lattice_scales<110>(p, n, 1.0f, [](const uint8_t* s) {
            const __m256i nibbles = _mm256_srlv_epi32(_mm256_set1_epi32(int(load_u32(s + 106))),
                                                      _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
            return _mm256_and_si256(nibbles, _mm256_set1_epi32(15));
        });
    }
};

// Subtracted from the bytes of a group whose delta is negative.
constexpr int kDeltas = 0x02020202;

template <>
struct Format<Type::IQ1_S> {
    static constexpr Type kType = Type::IQ1_S;
    static constexpr int kZero = kIq1Zero;
    static constexpr int kBytes = 2 * 50;
    static HOTSET_INLINE void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        const uint8_t* s = p + g / 2 * 50;
        // Repeat each of four words four times.
        const __m256i high = _mm256_shuffle_epi8(
            _mm256_permute4x64_epi64(_mm256_castsi128_si256(load64(s + 34 + g % 2 * 8)), 0),
            _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3,  //
                             4, 5, 4, 5, 4, 5, 4, 5, 6, 7, 6, 7, 6, 7, 6, 7));
        const __m256i three = _mm256_srlv_epi16(high, _mm256_set1_epi64x(0x0009000600030000));
        look_up(kIq1,
                Indices(_mm256_or_si256(_mm256_cvtepu8_epi16(load128(s + 2 + g % 2 * 16)),
                                        _mm256_slli_epi16(_mm256_and_si256(three, _mm256_set1_epi16(7)), 8))),
                a, b);
        const __mmask16 negative = _mm256_movepi16_mask(high);  // four bits per block, like a and b
        a = _mm512_mask_sub_epi32(a, negative, a, _mm512_set1_epi32(kDeltas));
        b = _mm512_mask_sub_epi32(b, negative, b, _mm512_set1_epi32(kDeltas));
    }
    static Scales scales(const uint8_t* p, int n) {
        return lattice_scales<50>(p, n, 0.125f, [](const uint8_t* s) {
            const __m256i words = _mm256_cvtepu16_epi32(load128(s + 34));
            return _mm256_and_si256(_mm256_srli_epi32(words, 12), _mm256_set1_epi32(7));
        });
    }
};

template <>
struct Format<Type::IQ1_M> {
    static constexpr Type kType = Type::IQ1_M;
    static constexpr int kZero = kIq1Zero;
    static constexpr int kBytes = 2 * 56;
    static HOTSET_INLINE void unpack(const uint8_t* p, int g, __m512i& a, __m512i& b) {
        const uint8_t* s = p + g / 2 * 56;
        const __m256i bytes = _mm256_cvtepu8_epi32(load64(s + 32 + g % 2 * 8));
        const __m256i nibbles = _mm256_or_si256(bytes, _mm256_slli_epi32(bytes, 12));  // in words, bits 0..3
        const __m256i high = _mm256_slli_epi16(_mm256_and_si256(nibbles, _mm256_set1_epi16(7)), 8);
        look_up(kIq1, Indices(_mm256_or_si256(_mm256_cvtepu8_epi16(load128(s + g % 2 * 16)), high)), a, b);
        const uint32_t negative = _cvtmask16_u32(_mm256_test_epi16_mask(nibbles, _mm256_set1_epi16(8)));
        const __m512i deltas = _mm512_set1_epi32(kDeltas);
        a = _mm512_mask_sub_epi64(a, __mmask8(_pext_u32(negative, 0x3333)), a, deltas);
        b = _mm512_mask_sub_epi64(b, __mmask8(_pext_u32(negative, 0xcccc)), b, deltas);
    }
    static Scales scales(const uint8_t* p, int n) {
        __m512i sub[2] = {};
        float d[2] = {0, 0};
        for_super_blocks<56>(p, n, [&](const uint8_t* s, int at) {
            d[at / 8] = scale_iq1_m(s + 48) * 0.125f;
            const __m256i words =
                _mm256_shuffle_epi8(_mm256_permute4x64_epi64(_mm256_castsi128_si256(load64(s + 48)), 0),
                                    _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3,  //
                                                     4, 5, 4, 5, 4, 5, 4, 5, 6, 7, 6, 7, 6, 7, 6, 7));
            const __m256i three = _mm256_srlv_epi16(words, _mm256_set1_epi64x(0x0009000600030000));
            sub[at / 8] = _mm512_cvtepu16_epi32(_mm256_and_si256(three, _mm256_set1_epi16(7)));
        });
        Scales out;
        out.scale = two_halves(d[0], d[1]);
        split_pairs(odd_scales(sub[0]), odd_scales(sub[1]), out.sub_scale);
        return out;
    }
};

// The number of bytes that a format may read past its sixteen blocks.
constexpr int kSlack = 128;

// Bytes from a row's blocks to those that are prefetched meanwhile, for one token and for a few (decision
// 008).
constexpr int kAhead = 8192, kFewAhead = 4096;

// kOnce: only one token reads the data.
template <bool kOnce>
HOTSET_INLINE void prefetch(const uint8_t* p, int bytes) {
    for (int at = 0; at < bytes; at += 64) {
        if constexpr (kOnce)
            V::fetch_once(p + at);
        else
            V::fetch(p + at);
    }
}

// Copy sixteen blocks at the end of the mapped file to where reading past them is allowed.
template <class Format>
inline const uint8_t* readable(const uint8_t* p, int n, const uint8_t* end, uint8_t* copy) {
    if (p + Format::kBytes + kSlack <= end) return p;
    // Storage blocks in sixteen 32-blocks.
    constexpr int kBlocks = 256 / type_facts(Format::kType).block_size * 2;
    const size_t bytes = size_t(n) * Format::kBytes / 16;
    static_assert(Format::kBytes == kBlocks * type_facts(Format::kType).block_bytes);
    memset(copy + bytes, 0, Format::kBytes + kSlack - bytes);
    memcpy(copy, p, bytes);
    return copy;
}

// Sums of four int32 lanes of each of sixteen blocks, one lane per block; dots[g]: 4g..4g+3.
inline __m512i lane_per_block(const __m512i dots[4]) {
    const __m512i ab =
        _mm512_add_epi32(_mm512_unpacklo_epi32(dots[0], dots[1]), _mm512_unpackhi_epi32(dots[0], dots[1]));
    const __m512i cd =
        _mm512_add_epi32(_mm512_unpacklo_epi32(dots[2], dots[3]), _mm512_unpackhi_epi32(dots[2], dots[3]));
    const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, all);  // lane 4j + g → 4g + j
}

inline __m512i times_zero(int zero, __m512i sums) {
    return _mm512_slli_epi32(sums, log2_of(zero));  // offsets are powers of two
}

// Add products to acc, one lane per block: from the int32 sums of first and of second halves, ordered as in
// lane_per_block (types without sub-blocks use only `first`), and from the inputs' scales and sums. Lanes
// outside `lanes` are undefined and may be NaN: they are masked, not multiplied by zero.
template <class Format>
HOTSET_INLINE __m512 add_dots(const __m512i first[4], const __m512i second[4], const Scales& s, __m512 input,
                              __m512i sums0, __m512i sums1, __m512 sum, __mmask16 lanes, __m512 acc) {
    constexpr bool kMin = has_min(Format::kType), kSub = has_sub_blocks(Format::kType);
    __m512i dot = lane_per_block(first);
    if constexpr (kSub) {
        __m512i dot1 = lane_per_block(second);
        if constexpr (Format::kZero) {
            dot = _mm512_sub_epi32(dot, times_zero(Format::kZero, sums0));
            dot1 = _mm512_sub_epi32(dot1, times_zero(Format::kZero, sums1));
        }
        dot = _mm512_add_epi32(_mm512_mullo_epi32(dot, s.sub_scale[0]),
                               _mm512_mullo_epi32(dot1, s.sub_scale[1]));
    } else if constexpr (Format::kZero) {
        dot = _mm512_sub_epi32(dot, times_zero(Format::kZero, _mm512_add_epi32(sums0, sums1)));
    }
    acc = _mm512_mask3_fmadd_ps(_mm512_mul_ps(s.scale, input), _mm512_cvtepi32_ps(dot), acc, lanes);
    if constexpr (kMin && kSub) {
        const __m512i mins = _mm512_add_epi32(_mm512_mullo_epi32(sums0, s.sub_min[0]),
                                              _mm512_mullo_epi32(sums1, s.sub_min[1]));
        acc = _mm512_mask3_fmadd_ps(_mm512_mul_ps(s.min, input), _mm512_cvtepi32_ps(mins), acc, lanes);
    } else if constexpr (kMin) {
        acc = _mm512_mask3_fmadd_ps(s.min, sum, acc, lanes);
    }
    return acc;
}

// Add `kGroups` groups of four blocks (n <= 16 blocks in total) of one row and one token to acc, one lane per
// block.
template <class Format, int kGroups>
inline __m512 add_blocks(const uint8_t* p, int n, const int8_t* q, const float* scale, const float* sum,
                         const int32_t* isum0, const int32_t* isum1, __m512 acc) {
    constexpr bool kSub = has_sub_blocks(Format::kType);
    __m512i first[4], second[4];
    for (int g = 0; g < 4; g++) first[g] = second[g] = _mm512_setzero_si512();
#pragma GCC unroll 4  // makes g a constant
    for (int g = 0; g < kGroups; g++) {
        __m512i a, b;
        Format::unpack(p, g, a, b);
        first[g] = _mm512_dpbusd_epi32(first[g], a, _mm512_loadu_si512(q + half_at(kInterleaved, 4 * g, 0)));
        __m512i& target = kSub ? second[g] : first[g];
        target = _mm512_dpbusd_epi32(target, b, _mm512_loadu_si512(q + half_at(kInterleaved, 4 * g, 1)));
    }
    return add_dots<Format>(first, second, Format::scales(p, n), _mm512_loadu_ps(scale),
                            _mm512_loadu_si512(isum0), _mm512_loadu_si512(isum1), _mm512_loadu_ps(sum),
                            V::first_lanes(n), acc);
}

// ahead: data as long as the row, to prefetch meanwhile. kInside: sixteen blocks and kSlack past the row may
// be read.
template <class Format, bool kInside>
HOTSET_INLINE float dot_of(const uint8_t* row, const uint8_t* ahead, const uint8_t* end, int64_t blocks,
                           const int8_t* q, const float* scale, const float* sum_, const int32_t* isum0,
                           const int32_t* isum1) {
    alignas(64) uint8_t copy[kInside ? 64 : Format::kBytes + kSlack];
    auto at = [&](const uint8_t* p, int n) { return kInside ? p : readable<Format>(p, n, end, copy); };
    __m512 acc = _mm512_setzero_ps();
    int64_t b = 0;
    const uint8_t* p = row;
    for (; b + 16 <= blocks; b += 16, p += Format::kBytes) {
        prefetch<true>(ahead + (p - row), Format::kBytes);
        acc =
            add_blocks<Format, 4>(at(p, 16), 16, q + b * 32, scale + b, sum_ + b, isum0 + b, isum1 + b, acc);
    }
    if (const int n = int(blocks - b)) {
        prefetch<true>(ahead + (p - row), n * Format::kBytes / 16);
        const uint8_t* last = at(p, n);
        switch ((n + 3) / 4) {
            case 1:
                acc = add_blocks<Format, 1>(last, n, q + b * 32, scale + b, sum_ + b, isum0 + b, isum1 + b,
                                            acc);
                break;
            case 2:
                acc = add_blocks<Format, 2>(last, n, q + b * 32, scale + b, sum_ + b, isum0 + b, isum1 + b,
                                            acc);
                break;
            case 3:
                acc = add_blocks<Format, 3>(last, n, q + b * 32, scale + b, sum_ + b, isum0 + b, isum1 + b,
                                            acc);
                break;
            case 4:
                acc = add_blocks<Format, 4>(last, n, q + b * 32, scale + b, sum_ + b, isum0 + b, isum1 + b,
                                            acc);
                break;
        }
    }
    return sum(V{acc});
}

// Return the scales of up to eight blocks at p, and of as many at q, in the lanes from 8 on.
template <class Format>
inline Scales scales_of_two(const uint8_t* p, const uint8_t* q, int n) {
    if constexpr (requires { Format::scales_of_two(p, q); }) {
        return Format::scales_of_two(p, q);
    } else {
        Scales s = Format::scales(p, n);
        const Scales other = Format::scales(q, n);
        auto join = [](auto& a, const auto& b) {
            a = decltype(+a)(_mm512_shuffle_i64x2(__m512i(a), __m512i(b), 0x44));
        };
        join(s.scale, other.scale);
        if constexpr (has_min(Format::kType)) join(s.min, other.min);
        for (int h = 0; has_sub_blocks(Format::kType) && h < 2; h++) {
            join(s.sub_scale[h], other.sub_scale[h]);
            if constexpr (has_min(Format::kType)) join(s.sub_min[h], other.sub_min[h]);
        }
        return s;
    }
}

// Two adjacent rows whose last step has five to eight blocks: these share a vector. With fewer blocks there
// is too little to share. As dot_of, if all bytes may be read.
template <class Format>
HOTSET_INLINE void dot_of_two(const uint8_t* row, int64_t row_bytes, int64_t blocks, const int8_t* q,
                              const float* scale, const float* sum_, const int32_t* isum0,
                              const int32_t* isum1, float* out) {
    constexpr bool kSub = has_sub_blocks(Format::kType);
    const uint8_t *p[2] = {row, row + row_bytes}, *ahead = row + kAhead;
    // Prefetched in the order of memory: in the order of use, the lines arrive at four fifths of the speed.
    auto prefetch_next = [&](int bytes) {
        prefetch<true>(ahead, bytes);
        ahead += bytes;
    };
    __m512 acc[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    int64_t b = 0;
    for (; b + 16 <= blocks; b += 16)
        for (int r = 0; r < 2; r++) {
            prefetch_next(Format::kBytes);
            acc[r] = add_blocks<Format, 4>(p[r], 16, q + b * 32, scale + b, sum_ + b, isum0 + b, isum1 + b,
                                           acc[r]);
            p[r] += Format::kBytes;
        }
    const int n = int(blocks - b);
    __m512i first[4], second[4];
    for (int r = 0; r < 2; r++) {
        prefetch_next(n * Format::kBytes / 16);
#pragma GCC unroll 2  // makes g a constant
        for (int g = 0; g < 2; g++) {
            __m512i a, c;
            Format::unpack(p[r], g, a, c);
            const __m512i zero = _mm512_setzero_si512();
            const int8_t* const own = q + b * 32 + half_at(kInterleaved, 4 * g, 0);
            __m512i& one = first[2 * r + g];
            one = _mm512_dpbusd_epi32(zero, a, _mm512_loadu_si512(own));
            __m512i& target = kSub ? second[2 * r + g] : one;
            target = _mm512_dpbusd_epi32(kSub ? zero : one, c, _mm512_loadu_si512(own + 64));
        }
    }
    auto twice = [](const void* numbers) {
        const __m512i v = _mm512_loadu_si512(numbers);
        return _mm512_shuffle_i64x2(v, v, 0x44);
    };
    const uint32_t own_lanes = (1u << n) - 1;
    const __m512 both = add_dots<Format>(
        first, second, scales_of_two<Format>(p[0], p[1], n), _mm512_castsi512_ps(twice(scale + b)),
        twice(isum0 + b), twice(isum1 + b), _mm512_castsi512_ps(twice(sum_ + b)),
        __mmask16(own_lanes | own_lanes << 8), _mm512_shuffle_f32x4(acc[0], acc[1], 0x44));
    out[0] = sum(V{_mm512_shuffle_f32x4(both, acc[0], 0xe4)});
    out[1] = sum(V{_mm512_shuffle_f32x4(both, acc[1], 0xee)});
}

template <class Format>
inline float dot(const uint8_t* row, const uint8_t* ahead, const uint8_t* end, int64_t blocks,
                 const int8_t* q, const float* scale, const float* sum_, const int32_t* isum0,
                 const int32_t* isum1) {
    return dot_of<Format, false>(row, ahead, end, blocks, q, scale, sum_, isum0, isum1);
}

// ---- A few tokens
//
// As for one token, but the codes of sixteen blocks are transposed: word i of each block is in vector i, one
// lane per block. The inputs are transposed once per call. Per token only the products are left. If a row
// ends with eight blocks or fewer, two rows' blocks share a vector.

constexpr int kFewRows = 8;  // rows that share a pass over the inputs

// Sixteen blocks of one token: eight vectors of words, then scales and other data that a format needs.
template <class Format>
struct FewLayout {
    static constexpr bool kMin = has_min(Format::kType), kSub = has_sub_blocks(Format::kType);
    static constexpr int kScale = 8;
    static constexpr int kStart = 9;  // minus the codes' offset times the sums
    static constexpr int kSum = kStart + (Format::kZero ? 1 + kSub : 0);
    static constexpr int kVectors = kSum + (kMin ? 1 + kSub : 0);
};

// Transpose: v[g] has four words of blocks 4g + j; v[i] gets word i of all, 4g + j in lane 4j + g.
inline void transpose_words(__m512i v[4]) {
    const __m512i ab_lo = _mm512_unpacklo_epi32(v[0], v[1]), ab_hi = _mm512_unpackhi_epi32(v[0], v[1]);
    const __m512i cd_lo = _mm512_unpacklo_epi32(v[2], v[3]), cd_hi = _mm512_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm512_unpacklo_epi64(ab_lo, cd_lo);
    v[1] = _mm512_unpackhi_epi64(ab_lo, cd_lo);
    v[2] = _mm512_unpacklo_epi64(ab_hi, cd_hi);
    v[3] = _mm512_unpackhi_epi64(ab_hi, cd_hi);
}

// Reorder numbers of sixteen blocks, one lane per block, to the lanes of transpose_words.
inline __m512i in_lanes(__m512i v) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                                    v);
}
inline __m512 in_lanes(__m512 v) {
    return _mm512_castsi512_ps(in_lanes(_mm512_castps_si512(v)));
}

// Return the lanes of the first n of sixteen blocks or, if paired, of eight in both halves.
inline __mmask16 block_lanes(int n, bool paired) {
    const uint32_t first = (1u << n) - 1;
    return _mm512_movepi32_mask(in_lanes(_mm512_movm_epi32(__mmask16(paired ? first | first << 8 : first))));
}

// out: [steps of sixteen blocks][n][kVectors]. A last step of eight blocks has them twice.
template <class Format>
inline void transpose_inputs(const Inputs& x, int t0, int n, __m512i* out) {
    using Layout = FewLayout<Format>;
    const int64_t blocks = x.k / 32, width = padded(x.k);
    for (int t = 0; t < n; t++) {
        const int8_t* q = x.q + (t0 + t) * width;
        const float* scale = x.scale + (t0 + t) * (width / 32);
        const float* sum = x.sum + (t0 + t) * (width / 32);
        const int32_t* isum = x.isum + (t0 + t) * (width / 16);
        for (int64_t b = 0; b < blocks; b += 16) {
            const bool paired = blocks - b <= 8;
            __m512i* to = out + (b / 16 * n + t) * Layout::kVectors;
            for (int half = 0; half < 2; half++) {
                __m512i v[4];
                for (int g = 0; g < 4; g++)
                    v[g] = _mm512_loadu_si512(q + b * 32 +
                                              half_at(kInterleaved, 4 * (paired ? g & 1 : g), half));
                transpose_words(v);
                for (int i = 0; i < 4; i++) _mm512_store_si512(to + 4 * half + i, v[i]);
            }
            auto load = [&](const void* numbers) {
                const __m512i v = _mm512_loadu_si512(numbers);
                return paired ? _mm512_shuffle_i64x2(v, v, 0x44) : v;
            };
            auto put = [to](int at, __m512i v) { _mm512_store_si512(to + at, in_lanes(v)); };
            put(Layout::kScale, load(scale + b));
            const __m512i sums0 = load(isum + b), sums1 = load(isum + width / 32 + b);
            auto start = [](__m512i sums) {
                return _mm512_sub_epi32(_mm512_setzero_si512(), times_zero(Format::kZero, sums));
            };
            if constexpr (Format::kZero && Layout::kSub) {
                put(Layout::kStart, start(sums0));
                put(Layout::kStart + 1, start(sums1));
            } else if constexpr (Format::kZero) {
                put(Layout::kStart, start(_mm512_add_epi32(sums0, sums1)));
            }
            if constexpr (Layout::kMin && Layout::kSub) {
                put(Layout::kSum, sums0);
                put(Layout::kSum + 1, sums1);
            } else if constexpr (Layout::kMin) {
                put(Layout::kSum, load(sum + b));
            }
        }
    }
}

// Sixteen transposed blocks of a row, or up to eight of each of two rows.
template <class Format>
struct FewBlocks {
    __m512i codes[8];
    Scales scales;

    HOTSET_INLINE FewBlocks(const uint8_t* p, int n) {
#pragma GCC unroll 4  // makes g a constant
        for (int g = 0; g < 4; g++) Format::unpack(p, g, codes[g], codes[4 + g]);
        scales = Format::scales(p, n);
        arrange();
    }
    HOTSET_INLINE FewBlocks(const uint8_t* p, const uint8_t* q, int n) {
#pragma GCC unroll 2
        for (int g = 0; g < 2; g++) {
            Format::unpack(p, g, codes[g], codes[4 + g]);
            Format::unpack(q, g, codes[2 + g], codes[6 + g]);
        }
        scales = scales_of_two<Format>(p, q, n);
        arrange();
    }

  private:
    static constexpr bool kMin = has_min(Format::kType), kSub = has_sub_blocks(Format::kType);

    HOTSET_INLINE void arrange() {
        transpose_words(codes);
        transpose_words(codes + 4);
        scales.scale = in_lanes(scales.scale);
        if constexpr (kMin) scales.min = in_lanes(scales.min);
        for (int h = 0; kSub && h < 2; h++) {
            scales.sub_scale[h] = in_lanes(scales.sub_scale[h]);
            if constexpr (kMin) scales.sub_min[h] = in_lanes(scales.sub_min[h]);
        }
    }
};

// Add sixteen blocks of R rows times a token to acc. lanes: of existing blocks.
template <class Format, int R>
HOTSET_INLINE void add_few(const FewBlocks<Format>* rows, const __m512i* x, __mmask16 lanes, __m512 acc[R]) {
    using Layout = FewLayout<Format>;
    __m512i dot[R], dot1[R];
    for (int r = 0; r < R; r++) {
        dot[r] = dot1[r] = _mm512_setzero_si512();
        if constexpr (Format::kZero) dot[r] = x[Layout::kStart];
        if constexpr (Format::kZero && Layout::kSub) dot1[r] = x[Layout::kStart + 1];
    }
    for (int i = 0; i < 8; i++)
        for (int r = 0; r < R; r++) {
            __m512i& target = Layout::kSub && i >= 4 ? dot1[r] : dot[r];
            target = _mm512_dpbusd_epi32(target, rows[r].codes[i], x[i]);
        }
    const __m512 input = _mm512_castsi512_ps(x[Layout::kScale]);
    for (int r = 0; r < R; r++) {
        const Scales& s = rows[r].scales;
        if constexpr (Layout::kSub)
            dot[r] = _mm512_add_epi32(_mm512_mullo_epi32(dot[r], s.sub_scale[0]),
                                      _mm512_mullo_epi32(dot1[r], s.sub_scale[1]));
        // Other lanes are undefined and may be NaN: they are masked, not multiplied by zero.
        acc[r] =
            _mm512_mask3_fmadd_ps(_mm512_mul_ps(s.scale, input), _mm512_cvtepi32_ps(dot[r]), acc[r], lanes);
        if constexpr (Layout::kMin && Layout::kSub) {
            const __m512i mins = _mm512_add_epi32(_mm512_mullo_epi32(x[Layout::kSum], s.sub_min[0]),
                                                  _mm512_mullo_epi32(x[Layout::kSum + 1], s.sub_min[1]));
            acc[r] =
                _mm512_mask3_fmadd_ps(_mm512_mul_ps(s.min, input), _mm512_cvtepi32_ps(mins), acc[r], lanes);
        } else if constexpr (Layout::kMin) {
            acc[r] = _mm512_mask3_fmadd_ps(s.min, _mm512_castsi512_ps(x[Layout::kSum]), acc[r], lanes);
        }
    }
}

// Add n <= 16 blocks of two rows, at p and q, times each token, to the rows' acc.
template <class Format>
inline void add_few_pair(const uint8_t* p, const uint8_t* q, int n, const __m512i* x, int tokens,
                         __m512* first, __m512* second) {
    const __mmask16 lanes = block_lanes(n, n <= 8);
    if (n > 8) {
        const FewBlocks<Format> rows[2] = {{p, n}, {q, n}};
        for (int t = 0; t < tokens; t++, x += FewLayout<Format>::kVectors) {
            __m512 acc[2] = {first[t], second[t]};
            add_few<Format, 2>(rows, x, lanes, acc);
            first[t] = acc[0], second[t] = acc[1];
        }
        return;
    }
    const FewBlocks<Format> rows[1] = {{p, q, n}};
    for (int t = 0; t < tokens; t++, x += FewLayout<Format>::kVectors) {
        const __m512d a = _mm512_castps_pd(first[t]), b = _mm512_castps_pd(second[t]);
        __m512 acc[1] = {_mm512_castpd_ps(_mm512_unpacklo_pd(a, b))};
        add_few<Format, 1>(rows, x, lanes, acc);
        const __m512d sums = _mm512_castps_pd(acc[0]);
        first[t] = _mm512_castpd_ps(_mm512_shuffle_pd(sums, a, 0xaa));
        second[t] = _mm512_castpd_ps(_mm512_shuffle_pd(sums, b, 0xff));
    }
}

// Sum the lanes of four vectors by the fixed tree: blocks b and b + 8, then b and b + 4, and so on.
inline __m128 four_sums(__m512 a, __m512 b, __m512 c, __m512 d) {
    return across(a, b, c, d, [](__m512 v, __m512 w) { return _mm512_add_ps(v, w); });
}

template <class Format>
void few(const Matrix& w, int64_t row0, int64_t row1, const Inputs& x, int t0, int n, float* out, int64_t ld,
         uint8_t* scratch) {
    static_assert(kFewRows % 4 == 0);
    __m512i* inputs = reinterpret_cast<__m512i*>(scratch);
    transpose_inputs<Format>(x, t0, n, inputs);
    const int64_t blocks = x.k / 32;
    // Prefetched in the order of the rows: if each row is prefetched separately, they arrive at two thirds of
    // the speed.
    const uint8_t* ahead = w.row(row0) + (kFewRows - 1) * w.row_bytes + kFewAhead;
    for (int64_t r = row0; r < row1; r += kFewRows) {
        __m512 acc[kFewRows][kFewTokens];
        const uint8_t* rows[kFewRows];
        for (int i = 0; i < kFewRows; i++) {
            rows[i] = w.row(imin(r + i, row1 - 1));
            for (int t = 0; t < n; t++) acc[i][t] = _mm512_setzero_ps();
        }
        const __m512i* at = inputs;
        for (int64_t b = 0; b < blocks; b += 16, at += n * FewLayout<Format>::kVectors) {
            const int count = imin(blocks - b, 16);
            alignas(64) uint8_t copies[2][Format::kBytes + kSlack];
            for (int i = 0; i < kFewRows; i += 2) {
                const uint8_t* p[2];
                for (int j = 0; j < 2; j++) {
                    p[j] = rows[i + j] + b / 16 * Format::kBytes;
                    prefetch<false>(ahead, count * Format::kBytes / 16);
                    ahead += count * Format::kBytes / 16;
                    p[j] = readable<Format>(p[j], count, w.end(), copies[j]);
                }
                add_few_pair<Format>(p[0], p[1], count, at, n, acc[i], acc[i + 1]);
            }
        }
        for (int i = 0; i < kFewRows && r + i < row1; i += 4) {
            const __mmask8 there = __mmask8((1u << imin(row1 - r - i, 4)) - 1);
            for (int t = 0; t < n; t++)
                _mm_mask_storeu_ps(out + t * ld + (r + i - row0), there,
                                   four_sums(acc[i][t], acc[i + 1][t], acc[i + 2][t], acc[i + 3][t]));
        }
    }
}

// ---- Many tokens

// Transpose sixteen vectors of sixteen 4-byte words.
inline void transpose(__m512i v[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 4) {
        const __m512i ab_lo = _mm512_unpacklo_epi32(v[i], v[i + 1]),
                      ab_hi = _mm512_unpackhi_epi32(v[i], v[i + 1]);
        const __m512i cd_lo = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]);
        const __m512i cd_hi = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
        t[i] = _mm512_unpacklo_epi64(ab_lo, cd_lo);      // words 0, 4, 8, 12 of four rows
        t[i + 1] = _mm512_unpackhi_epi64(ab_lo, cd_lo);  // words 1, 5, 9, 13
        t[i + 2] = _mm512_unpacklo_epi64(ab_hi, cd_hi);
        t[i + 3] = _mm512_unpackhi_epi64(ab_hi, cd_hi);
    }
    for (int i = 0; i < 4; i++) {
        const __m512i even01 = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88),
                      odd01 = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
        const __m512i even23 = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
        const __m512i odd23 = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
        v[i] = _mm512_shuffle_i32x4(even01, even23, 0x88);
        v[i + 8] = _mm512_shuffle_i32x4(even01, even23, 0xdd);
        v[i + 4] = _mm512_shuffle_i32x4(odd01, odd23, 0x88);
        v[i + 12] = _mm512_shuffle_i32x4(odd01, odd23, 0xdd);
    }
}

// at: the packed position of a block. kSigned: subtract the codes' offset; otherwise codes are unsigned.
template <class Format, bool kSigned, class At>
inline void pack_panel(const Matrix& w, int64_t row, int n_rows, int64_t blocks, const At& at,
                       const Panel& panel) {
    constexpr bool kMin = has_min(Format::kType), kSub = has_sub_blocks(Format::kType);
    for (int64_t b = 0; b < blocks; b += 16) {
        const int n = imin(blocks - b, 16), groups = (n + 3) / 4;
        alignas(64) uint8_t copies[16][Format::kBytes + kSlack];
        const uint8_t* rows[16];
        Scales scales[16];
        for (int r = 0; r < 16; r++) {  // a short panel repeats its last row
            rows[r] = w.row(row + imin(r, n_rows - 1)) + b / 16 * Format::kBytes;
            rows[r] = readable<Format>(rows[r], n, w.end(), copies[r]);
            scales[r] = Format::scales(rows[r], n);
        }
        for (int g = 0; g < groups; g++) {
            __m512i first[16], second[16];
            for (int r = 0; r < 16; r++) Format::unpack(rows[r], g, first[r], second[r]);
            transpose(first);
            transpose(second);
            for (int j = 0; j < imin(n - 4 * g, 4); j++) {
                __m512i* block = panel.codes + at(b + 4 * g + j) * 8;
                const __m512i zero = _mm512_set1_epi8(int8_t(kSigned ? Format::kZero : 0));
                for (int i = 0; i < 4; i++) {
                    _mm512_store_si512(block + i, _mm512_sub_epi8(first[4 * j + i], zero));
                    _mm512_store_si512(block + 4 + i, _mm512_sub_epi8(second[4 * j + i], zero));
                }
            }
        }
        __m512i lanes[16];
        auto place = [&](auto get, auto* out, int64_t stride) {
            for (int r = 0; r < 16; r++) lanes[r] = get(scales[r]);
            transpose(lanes);
            for (int i = 0; i < n; i++) _mm512_store_si512(out + at(b + i) * stride, lanes[i]);
        };
        place([](const Scales& s) { return _mm512_castps_si512(s.scale); }, panel.scale, 16);
        if constexpr (kMin) place([](const Scales& s) { return _mm512_castps_si512(s.min); }, panel.min, 16);
        for (int h = 0; kSub && h < 2; h++) {
            place([h](const Scales& s) { return s.sub_scale[h]; }, panel.sub_scale + 16 * h, 32);
            if constexpr (kMin)
                place([h](const Scales& s) { return s.sub_min[h]; }, panel.sub_min + 16 * h, 32);
        }
    }
}

// The scratch memory of a call, allocated part by part.
struct Scratch {
    uint8_t* free;  // 64-byte aligned

    template <class T>
    T* of(int64_t n) {
        T* p = reinterpret_cast<T*>(free);
        free += (n * sizeof(T) + 63) / 64 * 64;
        return p;
    }
    Panel panel(int64_t blocks) {
        return {of<__m512i>(blocks * 8), of<float>(blocks * 16), of<float>(blocks * 16),
                of<int32_t>(blocks * 32), of<int32_t>(blocks * 32)};
    }
};

// One token's inputs as the panel kernel reads them. start: minus the codes' offset times the sums.
struct TokenInputs {
    const int8_t* q;
    const float* scale;
    const float* sum;
    const int32_t* isum0;
    const int32_t* isum1;
    const int32_t* start0;
    const int32_t* start1;
};

constexpr int kTokenTile = 6;

inline __m512i broadcast_word(const int8_t* p) {
    int32_t word;
    memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}

template <class Format, int T>
inline void panel_tile(const Panel& panel, int64_t blocks, const TokenInputs* x,
                       float (*acc)[kTokenTile][16]) {
    constexpr bool kMin = has_min(Format::kType), kSub = has_sub_blocks(Format::kType);
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t at = half_at(kInterleaved, b, 0);
        __m512i codes[8];
        for (int i = 0; i < 8; i++) codes[i] = _mm512_load_si512(panel.codes + b * 8 + i);
        const __m512 scale = _mm512_load_ps(panel.scale + b * 16);
        for (int t = 0; t < T; t++) {
            const int8_t* q = x[t].q + at;
            __m512i dot = Format::kZero ? _mm512_set1_epi32(x[t].start0[b]) : _mm512_setzero_si512();
            for (int i = 0; i < 4; i++) dot = _mm512_dpbusd_epi32(dot, codes[i], broadcast_word(q + 4 * i));
            if constexpr (kSub) {
                __m512i dot1 = Format::kZero ? _mm512_set1_epi32(x[t].start1[b]) : _mm512_setzero_si512();
                for (int i = 0; i < 4; i++)
                    dot1 = _mm512_dpbusd_epi32(dot1, codes[4 + i], broadcast_word(q + 64 + 4 * i));
                dot = _mm512_add_epi32(
                    _mm512_mullo_epi32(dot, _mm512_load_si512(panel.sub_scale + b * 32)),
                    _mm512_mullo_epi32(dot1, _mm512_load_si512(panel.sub_scale + b * 32 + 16)));
            } else {
                for (int i = 0; i < 4; i++)
                    dot = _mm512_dpbusd_epi32(dot, codes[4 + i], broadcast_word(q + 64 + 4 * i));
            }
            const __m512 input = _mm512_set1_ps(x[t].scale[b]);
            float* lane = acc[b % 16][t];
            __m512 total =
                _mm512_fmadd_ps(_mm512_mul_ps(scale, input), _mm512_cvtepi32_ps(dot), _mm512_load_ps(lane));
            if constexpr (kMin && kSub) {
                const __m512i mins =
                    _mm512_add_epi32(_mm512_mullo_epi32(_mm512_set1_epi32(x[t].isum0[b]),
                                                        _mm512_load_si512(panel.sub_min + b * 32)),
                                     _mm512_mullo_epi32(_mm512_set1_epi32(x[t].isum1[b]),
                                                        _mm512_load_si512(panel.sub_min + b * 32 + 16)));
                total = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_load_ps(panel.min + b * 16), input),
                                        _mm512_cvtepi32_ps(mins), total);
            } else if constexpr (kMin) {
                total =
                    _mm512_fmadd_ps(_mm512_load_ps(panel.min + b * 16), _mm512_set1_ps(x[t].sum[b]), total);
            }
            _mm512_store_ps(lane, total);
        }
    }
}

template <class Format>
void panels(const Matrix& w, int64_t row0, int64_t row1, const Inputs& x, int t0, int t1, float* out,
            int64_t ld, uint8_t* scratch) {
    const int64_t blocks = x.k / 32, width = padded(x.k);
    Scratch take{scratch};
    Panel panel[kPanelRows / 16];
    for (Panel& p : panel) p = take.panel(blocks);
    int32_t* starts = take.of<int32_t>(kTokenTile * blocks * 2);
    for (int64_t r = row0; r < row1; r += kPanelRows) {
        const int n_panels = (imin(row1 - r, kPanelRows) + 15) / 16;
        for (int i = 0; i < n_panels; i++)
            pack_panel<Format, false>(
                w, r + 16 * i, imin(row1 - r - 16 * i, 16), blocks, [](int64_t b) { return b; }, panel[i]);
        for (int t = t0; t < t1; t += kTokenTile) {
            const int n = imin(t1 - t, kTokenTile);
            TokenInputs tokens[kTokenTile];
            for (int i = 0; i < n; i++) {
                const int32_t* isum = x.isum + (t + i) * (width / 16);
                int32_t* start0 = starts + i * blocks * 2;
                int32_t* start1 = start0 + blocks;
                tokens[i] = {x.q + (t + i) * width,
                             x.scale + (t + i) * (width / 32),
                             x.sum + (t + i) * (width / 32),
                             isum,
                             isum + width / 32,
                             start0,
                             start1};
                if constexpr (Format::kZero != 0) {
                    for (int64_t b = 0; b < blocks; b++) {
                        const bool halves = has_sub_blocks(Format::kType);
                        const uint32_t first = uint32_t(isum[b]), second = uint32_t(isum[width / 32 + b]);
                        start0[b] = int32_t(-uint32_t(Format::kZero) * (first + (halves ? 0 : second)));
                        start1[b] = int32_t(-uint32_t(Format::kZero) * second);
                    }
                }
            }
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
                    case 4:
                        panel_tile<Format, 4>(panel[i], blocks, tokens, acc);
                        break;
                    case 5:
                        panel_tile<Format, 5>(panel[i], blocks, tokens, acc);
                        break;
                    default:
                        panel_tile<Format, 6>(panel[i], blocks, tokens, acc);
                        break;
                }
                const int64_t row = r + 16 * i;
                for (int j = 0; j < n; j++) {
                    __m512 lane[16];
                    for (int l = 0; l < 16; l++) lane[l] = _mm512_load_ps(acc[l][j]);
                    for (int half = 8; half; half /= 2)
                        for (int l = 0; l < half; l++) lane[l] = _mm512_add_ps(lane[l], lane[l + half]);
                    V{lane[0]}.store_n(out + (t + j - t0) * ld + (row - row0), imin(row1 - row, 16));
                }
            }
        }
    }
}

template <class Format>
inline float one_row(const Matrix& w, const uint8_t* row, const Inputs& x, int t, const uint8_t* ahead) {
    const int64_t width = padded(x.k);
    const int32_t* isum = x.isum + t * (width / 16);
    return dot<Format>(row, ahead, w.end(), x.k / 32, x.q + t * width, x.scale + t * (width / 32),
                       x.sum + t * (width / 32), isum, isum + width / 32);
}

template <class Format>
void linear(const Matrix& w, int64_t row0, int64_t row1, const Inputs& x, int t0, int t1, float* out,
            int64_t ld, uint8_t* scratch) {
    if (t1 - t0 > 1 && t1 - t0 <= kFewTokens)
        return few<Format>(w, row0, row1, x, t0, t1 - t0, out, ld, scratch);
    if (t1 - t0 > 1) return panels<Format>(w, row0, row1, x, t0, t1, out, ld, scratch);
    int64_t r = row0;
    if (!w.places) {  // nearly all rows are in one loop, which sets up shared data once
        const int64_t width = padded(x.k), blocks = x.k / 32;
        const int8_t* const q = x.q + t0 * width;
        const float *const scale = x.scale + t0 * (width / 32), *const sum_ = x.sum + t0 * (width / 32);
        const int32_t *const isum0 = x.isum + t0 * (width / 16), *const isum1 = isum0 + width / 32;
        const int64_t inside = int64_t(w.end() - w.data) - int64_t(w.row_bytes) - Format::kBytes - kSlack;
        const int64_t row_bytes = int64_t(w.row_bytes);
        if (const int64_t last = blocks % 16; last > 4 && last <= 8)
            for (int64_t at = r * row_bytes; r + 2 <= row1 && at + row_bytes <= inside;
                 r += 2, at += 2 * row_bytes)
                dot_of_two<Format>(w.data + at, row_bytes, blocks, q, scale, sum_, isum0, isum1,
                                   out + r - row0);
        for (int64_t at = r * row_bytes; r < row1 && at <= inside; r++, at += row_bytes)
            out[r - row0] = dot_of<Format, true>(w.data + at, w.data + at + kAhead, w.end(), blocks, q, scale,
                                                 sum_, isum0, isum1);
    }
    for (; r < row1; r++) out[r - row0] = one_row<Format>(w, w.row(r), x, t0, w.row(r) + kAhead);
}

// ---- Many tokens, with AMX

#ifdef HOTSET_AMX
void pack_token(const Inputs& x, int t, int place, uint8_t* tiles) {
    const TokenTile tile(tiles + place / kTileTokens * tile_bytes(x.k), x.k);
    const int64_t blocks = x.k / 32, width = padded(x.k);
    const int8_t* const q = x.q + t * width;
    const float *const scale = x.scale + t * (width / 32), *const sum = x.sum + t * (width / 32);
    const int32_t *const isum0 = x.isum + t * (width / 16), *const isum1 = isum0 + width / 32;
    const TurnOrder order(blocks);
    const int i = place % kTileTokens;
    for (int lane = 0; lane < imin(blocks, 16); lane++) {
        int64_t at = order(lane);
        for (int64_t b = lane; b < blocks; b += 16, at++) {
            int8_t* const codes = tile.q + (at * kTileTokens + i) * 32;
            for (int half = 0; half < 2; half++)
                _mm_store_si128(
                    reinterpret_cast<__m128i*>(codes + 16 * half),
                    load128(reinterpret_cast<const uint8_t*>(q) + half_at(kInterleaved, b, half)));
            tile.scale[at * kTileTokens + i] = scale[b];
            tile.sum[at * kTileTokens + i] = sum[b];
            tile.half_sum[at * 2 * kTileTokens + i] = float(isum0[b]);
            tile.half_sum[(at * 2 + 1) * kTileTokens + i] = float(isum1[b]);
        }
    }
}

template <class Format>
void tiles(const Matrix& w, int64_t row0, int64_t row1, const Inputs& x, int t0, int t1, float* out,
           int64_t ld, uint8_t* scratch) {
    if (t1 - t0 <= kFewTokens) return linear<Format>(w, row0, row1, x, t0, t1, out, ld, scratch);
    constexpr bool kMin = has_min(Format::kType), kSub = has_sub_blocks(Format::kType);
    constexpr int kPanels = kPanelRows / 16, kTokens = kTilesAtOnce * kTileTokens;
    const TileKernel kernel = tile_kernel(kMin, kSub);
    const int64_t blocks = x.k / 32;
    const TurnOrder order(blocks);
    Scratch take{scratch};
    Panel panel[kPanels];
    for (Panel& p : panel) p = take.panel(blocks);
    uint8_t* const packed = take.of<uint8_t>(kTilesAtOnce * tile_bytes(x.k));
    begin_tiles(kSub);
    for (int64_t r = row0; r < row1; r += kPanelRows) {
        const int n_panels = (imin(row1 - r, kPanelRows) + 15) / 16;
        for (int i = 0; i < n_panels; i++)
            pack_panel<Format, true>(w, r + 16 * i, imin(row1 - r - 16 * i, 16), blocks, order, panel[i]);
        for (int t = t0; t < t1; t += kTokens) {
            const int n = imin(t1 - t, kTokens), n_tiles = (n + kTileTokens - 1) / kTileTokens;
            TokenTile tile[kTilesAtOnce];
            if (x.tiles && t % kTileTokens == 0) {
                for (int j = 0; j < n_tiles; j++)
                    tile[j] = {const_cast<uint8_t*>(x.tiles) + (t / kTileTokens + j) * tile_bytes(x.k), x.k};
            } else {
                for (int j = 0; j < n; j++) pack_token(x, t + j, j, packed);
                for (int j = 0; j < n_tiles; j++) tile[j] = {packed + j * tile_bytes(x.k), x.k};
            }
            kernel({panel, tile, n_panels, n_tiles, imin(row1 - r, kPanelRows), n,
                    out + (t - t0) * ld + (r - row0), ld},
                   order);
        }
    }
    end_tiles();
}
#endif

// Decode the scales of n <= 16 blocks of kStride bytes that begin with an f16 scale.
template <int kStride>
inline void block_scales(const uint8_t* p, int n, const uint8_t* end, float* out) {
    if (p + 16 * kStride + kSlack <= end)
        return _mm512_store_ps(out, HeadScales<kStride, false>::scales(p, n).scale);
    for (int i = 0; i < n; i++) out[i] = half(load_u16(p + i * kStride));
}

#include "sparse_kernels.h"
#include "channels_avx512.h"
#include "channel_kernels.h"
#include "format_table.h"
#include "encode_kernels.h"
#include "codebook_encoders.h"

}  // namespace hotset::avx512

namespace hotset {

const Kernels* avx512_kernels() {
    static const Kernels table = [] {
        using namespace avx512;
        Kernels t = float_kernel_table("avx512");
        add_formats(t);
        add_sparse_kernels(t);
        add_encoders(t);
        add_codebook_encoders(t);
        add_channel_kernels(t);
        return t;
    }();
    return &table;
}

const Kernels* amx_kernels() {
#ifdef HOTSET_AMX
    static const Kernels table = [] {
        Kernels t = *avx512_kernels();
        t.isa = "amx";
        t.pack_token = avx512::pack_token;
        avx512::for_formats([&t]<class Format>() { t.linear[int(Format::kType)] = avx512::tiles<Format>; });
        return t;
    }();
    return &table;
#else
    return nullptr;
#endif
}

}  // namespace hotset
