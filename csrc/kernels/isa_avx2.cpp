// AVX2, FMA and F16C. A vector holds half a 32-block of each block of a pair, one 128-bit lane per block:
// blocks g and g + 4 of eight. Adding four such pairs within lanes gives sums in the order of the blocks.
// Both blocks of a super-block's pair are stored alike, so that one shift extracts the codes of both.
//
// One token: eight blocks per step, whose dot products are summed into one vector, one lane per block. The
// sixteen lanes of the canonical order are two accumulators, for even and odd steps. Many tokens: eight rows
// are packed into a panel whose lanes are rows, so that no sum crosses lanes.
//
// maddubs multiplies unsigned codes by signed inputs and adds pairs in int16, where it would saturate
// silently. Inputs are in [-127, 127], so a pair with codes up to kMaxCode is within 254 * kMaxCode.
// `kInt16Terms` such pairs may be added before widening. Signed codes up to 128 are passed as magnitudes,
// with their signs moved to the inputs.
//
// With HOTSET_AVX_VNNI these are the AVX-VNNI kernels: for several tokens and unsigned codes, four products
// at once are added in int32.
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <utility>

#include "codebooks.h"
#include "kernels.h"

#ifdef HOTSET_AVX_VNNI  // isa_avx_vnni.cpp
namespace hotset::avx_vnni {
#else
namespace hotset::avx2 {
#endif

#include "blocks.h"
#include "simd_avx2.h"
#include "float_kernels.h"

inline float half(uint16_t bits) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}

// Scales of eight blocks of one row, one lane per block. Sub-blocks' int16 scales are two per lane.
struct Scales {
    __m256 scale;
    __m256 min;  // K-quants: as stored, to be subtracted by add_min()
    __m256i sub_scale;
    __m256i sub_min;
};

inline __m128i load128(const void* p) {
    return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
inline __m256i load256(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline __m256i broadcast128(const uint8_t* p) {
    return _mm256_broadcastsi128_si256(load128(p));
}
// Load 16 bytes at a and 16 at b, with a < b. The blend takes its upper lane from memory directly; inserting
// it would take as long as two shuffles.
inline __m256i two_lanes(const uint8_t* a, const uint8_t* b) {
    return _mm256_blend_epi32(_mm256_castsi128_si256(load128(a)), load256(b - 16), 0xf0);
}

inline __m256i low_nibbles(__m256i v) {
    return _mm256_and_si256(v, _mm256_set1_epi8(15));
}
inline __m256i high_nibbles(__m256i v) {
    return low_nibbles(_mm256_srli_epi16(v, 4));
}

// Shift bits left by kLeft (right if negative) and mask each byte with kMask. The bits must stay in their
// byte.
template <int kLeft, int kMask>
inline __m256i moved_bits(__m256i bytes) {
    __m256i moved = bytes;
    if constexpr (kLeft > 0) moved = _mm256_slli_epi16(bytes, kLeft);
    if constexpr (kLeft < 0) moved = _mm256_srli_epi16(bytes, -kLeft);
    return _mm256_and_si256(moved, _mm256_set1_epi8(kMask));
}
// Bytes whose bit j belongs to block j of eight: shift so that bit g is block g's in the lower 128-bit lane,
// and block g + 4's in the upper.
inline __m256i bits_of_pairs(const uint8_t* p) {
    return _mm256_srlv_epi32(broadcast128(p), _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
}

// Load kCount 4-byte words, kStride bytes apart; other lanes are undefined. A load with the word in its lane
// is an operand of the blend. A load that would read past the last word is a broadcast instead, which costs
// one instruction more. A gather is slow on most processors without AVX-512.
template <int kStride, int kCount, int kAll = kCount>
inline __m256i words_at_stride(const uint8_t* p) {
    constexpr int i = kCount - 1, kFirst = (kStride - 4) * i, kEnd = kStride * (kAll - 1) + 4;
    const __m256i word =
        kFirst + 32 <= kEnd ? load256(p + kFirst) : _mm256_set1_epi32(int(load_u32(p + kStride * i)));
    if constexpr (kCount == 1) {
        return word;
    } else {
        const __m256i others = words_at_stride<kStride, i, kAll>(p);  // the blend may be a macro
        return _mm256_blend_epi32(others, word, 1 << i);
    }
}

// Load eight 2-byte words, kStride bytes apart.
template <int kStride, int kCount = 8>
inline __m128i halves_at_stride(const uint8_t* p) {
    if constexpr (kCount == 0) {
        return _mm_setzero_si128();
    } else {
        constexpr int i = kCount - 1;
        const __m128i others = halves_at_stride<kStride, i>(p), word = load128(p + (kStride - 2) * i);
        return i == 0 ? word : _mm_blend_epi16(others, word, 1 << i);
    }
}

// Each format has unpack<g, n>(p, a, b), which decodes blocks g and g + 4 of the n at p: first halves into a,
// second halves into b; and scales<n>(p) for all n. Weight = code - kZero; kMaxCode bounds codes. Nothing
// past the n blocks is read; block g + 4 is undefined if it is not one of the n.

// A type without instructions of its own: each block as blocks.h decodes it.
template <Type kOf>
struct Format {
    static_assert(!has_min(kOf) && !has_sub_blocks(kOf));
    static constexpr Type kType = kOf;
    static constexpr int kZero = 0, kMaxCode = 128;
    static constexpr bool kSigned = true;
    static constexpr int kBytes = 256 / type_facts(kOf).block_size * type_facts(kOf).block_bytes;

    template <int g, int n>
    static void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        alignas(32) int8_t codes[2][32] = {};
        for (int lane = 0; lane < 2 && g + 4 * lane < n; lane++) {
            const Block32 block = decode_block(kType, p, g + 4 * lane);
            for (int i = 0; i < 32; i++) codes[i / 16][16 * lane + i % 16] = int8_t(block.q[i]);
        }
        a = load256(codes[0]);
        b = load256(codes[1]);
    }
    template <int n>
    static Scales scales(const uint8_t* p) {
        alignas(32) float scale[8] = {};
        for (int i = 0; i < n; i++) scale[i] = decode_block(kType, p, i).scale;
        Scales s = {};
        s.scale = _mm256_load_ps(scale);
        return s;
    }
};

// Types with 32-blocks: an f16 scale (and minimum) at the beginning of each block, then sixteen bytes of
// codes at offset kHead.
template <int kHead, int kBlockBytes, bool kMin>
struct Nibbles {
    static constexpr bool kSigned = false;
    static constexpr int kBytes = 8 * kBlockBytes;

    template <int n>
    static Scales scales(const uint8_t* p) {
        if constexpr (!kMin && n == 8) {
            Scales s = {};
            s.scale = _mm256_cvtph_ps(halves_at_stride<kBlockBytes>(p));
            return s;
        }
        const __m256i words = words_at_stride<kBlockBytes, n>(p);
        const __m256i split = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                               0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
        const __m256i halves = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(words, split), 0xd8);
        Scales s = {};
        s.scale = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
        if constexpr (kMin) s.min = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
        return s;
    }
    // Load 16 bytes of codes of each block of the pair, at offset kSkip; the first for a missing one.
    template <int g, int n, int kSkip = 0>
    static __m256i codes(const uint8_t* p) {
        const uint8_t* first = p + g * kBlockBytes + kHead + kSkip;
        return g + 4 < n ? two_lanes(first, first + 4 * kBlockBytes) : broadcast128(first);
    }

    template <int g, int n>
    static void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        const __m256i both = codes<g, n>(p);
        a = low_nibbles(both);
        b = high_nibbles(both);
    }
};

template <>
struct Format<Type::Q4_0> : Nibbles<2, 18, false> {
    static constexpr Type kType = Type::Q4_0;
    static constexpr int kZero = 8, kMaxCode = 15;
};

template <>
struct Format<Type::Q4_1> : Nibbles<4, 20, true> {
    static constexpr Type kType = Type::Q4_1;
    static constexpr int kZero = 0, kMaxCode = 15;
};

template <int kHead, int kBlockBytes, bool kMin>
struct FiveBits : Nibbles<kHead, kBlockBytes, kMin> {
    using Base = Nibbles<kHead, kBlockBytes, kMin>;
    static constexpr int kMaxCode = 31;

    // Return bit i of the two bytes that `pick` repeats, as 16 or 0 in byte i.
    static __m256i spread(__m256i bits, __m256i pick) {
        const __m256i each = _mm256_set1_epi64x(int64_t(0x8040201008040201));
        const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(bits, pick), each), each);
        return _mm256_and_si256(set, _mm256_set1_epi8(16));
    }
    template <int g, int n>
    static void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        Base::template unpack<g, n>(p, a, b);
        const uint8_t* first = p + g * kBlockBytes + kHead - 4;
        const uint8_t* second = first + (g + 4 < n ? 4 * kBlockBytes : 0);
        const __m256i bits = _mm256_blend_epi32(_mm256_set1_epi32(int(load_u32(first))),
                                                _mm256_set1_epi32(int(load_u32(second))), 0xf0);
        constexpr int64_t kOnes = 0x0101010101010101;
        a = _mm256_or_si256(a, spread(bits, _mm256_setr_epi64x(0, kOnes, 0, kOnes)));
        b = _mm256_or_si256(b, spread(bits, _mm256_setr_epi64x(2 * kOnes, 3 * kOnes, 2 * kOnes, 3 * kOnes)));
    }
};

// The codes follow the fifth bits, four bytes later.
template <>
struct Format<Type::Q5_0> : FiveBits<6, 22, false> {
    static constexpr Type kType = Type::Q5_0;
    static constexpr int kZero = 16;
};

template <>
struct Format<Type::Q5_1> : FiveBits<8, 24, true> {
    static constexpr Type kType = Type::Q5_1;
    static constexpr int kZero = 0;
};

template <>
struct Format<Type::Q8_0> : Nibbles<2, 34, false> {
    static constexpr Type kType = Type::Q8_0;
    static constexpr int kZero = 0, kMaxCode = 128;
    static constexpr bool kSigned = true;

    template <int g, int n>
    static void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        a = codes<g, n>(p);
        b = codes<g, n, 16>(p);
    }
};

inline __m256i iq4_codes(__m256i nibbles) {
    const __m256i table = _mm256_broadcastsi128_si256(load128(kIq4Values));
    return _mm256_shuffle_epi8(table, nibbles);
}

template <>
struct Format<Type::IQ4_NL> : Nibbles<2, 18, false> {
    static constexpr Type kType = Type::IQ4_NL;
    static constexpr int kZero = 0, kMaxCode = 128;
    static constexpr bool kSigned = true;

    template <int g, int n>
    static void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        Nibbles::unpack<g, n>(p, a, b);
        a = iq4_codes(a);
        b = iq4_codes(b);
    }
};

template <>
struct Format<Type::MXFP4> : Nibbles<1, 17, false> {
    static constexpr Type kType = Type::MXFP4;
    static constexpr int kZero = 16, kMaxCode = 28;

    static __m256i offset(__m256i nibbles) {
        alignas(16) static constexpr uint8_t kOffset[16] = {16, 17, 18, 19, 20, 22, 24, 28,
                                                            16, 15, 14, 13, 12, 10, 8,  4};
        return _mm256_shuffle_epi8(broadcast128(kOffset), nibbles);
    }
    template <int g, int n>
    static void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        Nibbles::unpack<g, n>(p, a, b);
        a = offset(a);
        b = offset(b);
    }
    template <int n>
    static Scales scales(const uint8_t* p) {
        // Half of 2^(e - 127): half of the float with exponent e or, if e is 0, of 2^-127, a denormal.
        const __m256i twice = _mm256_srli_epi32(_mm256_slli_epi32(words_at_stride<17, n>(p), 24), 1);
        const __m256i power = _mm256_max_epi32(twice, _mm256_set1_epi32(1 << 22));
        Scales s = {};
        s.scale = _mm256_mul_ps(_mm256_castsi256_ps(power), _mm256_set1_ps(0.5f));
        return s;
    }
};

// Types with super-blocks: always eight blocks, which are one super-block.

// Load two adjacent f16, each into all lanes. A single one is loaded with its neighbour, because loading it
// separately takes longer.
inline void two_halves(const uint8_t* p, __m256& first, __m256& second) {
    float word;
    memcpy(&word, p, 4);
    const __m256 both = _mm256_cvtph_ps(_mm_castps_si128(_mm_set1_ps(word)));
    first = _mm256_moveldup_ps(both);
    second = _mm256_movehdup_ps(both);
}
inline __m256 second_half(const uint8_t* p) {
    __m256 first, second;
    two_halves(p, first, second);
    return second;
}

inline __m256 times(uint16_t scale, __m256i integers) {
    return _mm256_mul_ps(_mm256_set1_ps(half(scale)), _mm256_cvtepi32_ps(integers));
}

template <>
struct Format<Type::IQ4_XS> {
    static constexpr Type kType = Type::IQ4_XS;
    static constexpr int kZero = 0, kMaxCode = 128;
    static constexpr bool kSigned = true;
    static constexpr int kBytes = 136;

    template <int g, int n>
    static void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        const __m256i codes = two_lanes(p + 8 + 16 * g, p + 72 + 16 * g);
        a = iq4_codes(low_nibbles(codes));
        b = iq4_codes(high_nibbles(codes));
    }
    template <int n>
    static Scales scales(const uint8_t* p) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i low =
            _mm256_srlv_epi32(_mm256_set1_epi32(int(load_u32(p + 4))), _mm256_slli_epi32(lane, 2));
        const __m256i high =
            _mm256_srlv_epi32(_mm256_set1_epi32(load_u16(p + 2)), _mm256_slli_epi32(lane, 1));
        const __m256i six_bits =
            _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi32(15)),
                            _mm256_slli_epi32(_mm256_and_si256(high, _mm256_set1_epi32(3)), 4));
        Scales s = {};
        s.scale = times(load_u16(p), _mm256_sub_epi32(six_bits, _mm256_set1_epi32(32)));
        return s;
    }
};

// Q4_K and Q5_K: their 6-bit scales and minimums (unpack_scale_min) are unpacked in general registers, since
// the vector units are busy.
struct KScales {
    static constexpr bool kSigned = false;

    template <int n>
    static Scales scales(const uint8_t* p) {
        const uint32_t w0 = load_u32(p + 4), w1 = load_u32(p + 8), w2 = load_u32(p + 12);
        const uint64_t scale_high = (w2 & 0x0f0f0f0f) | (w0 >> 2 & 0x30303030);
        const uint64_t min_high = (w2 >> 4 & 0x0f0f0f0f) | (w1 >> 2 & 0x30303030);
        const uint64_t scales = (w0 & 0x3f3f3f3f) | scale_high << 32,
                       mins = (w1 & 0x3f3f3f3f) | min_high << 32;
        __m256 scale, min;
        two_halves(p, scale, min);
        Scales s = {};
        s.scale = _mm256_mul_ps(scale, bytes_to_floats(scales));
        s.min = _mm256_mul_ps(min, bytes_to_floats(mins));
        return s;
    }
    static __m256 bytes_to_floats(uint64_t bytes) {
        return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(bytes))));
    }
};

template <>
struct Format<Type::Q4_K> : KScales {
    static constexpr Type kType = Type::Q4_K;
    static constexpr int kZero = 0, kMaxCode = 15;
    static constexpr int kBytes = 144;

    template <int g, int n>
    static void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        const uint8_t* codes = p + 16 + 32 * (g / 2);
        a = moved_bits<-4 * (g % 2), 15>(two_lanes(codes, codes + 64));
        b = moved_bits<-4 * (g % 2), 15>(two_lanes(codes + 16, codes + 80));
    }
};

template <>
struct Format<Type::Q5_K> : KScales {
    static constexpr Type kType = Type::Q5_K;
    static constexpr int kZero = 0, kMaxCode = 31;
    static constexpr int kBytes = 176;

    template <int g, int n>
    static void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        const uint8_t* codes = p + 48 + 32 * (g / 2);
        a = _mm256_or_si256(moved_bits<-4 * (g % 2), 15>(two_lanes(codes, codes + 64)),
                            moved_bits<4 - g, 16>(bits_of_pairs(p + 16)));
        b = _mm256_or_si256(moved_bits<-4 * (g % 2), 15>(two_lanes(codes + 16, codes + 80)),
                            moved_bits<4 - g, 16>(bits_of_pairs(p + 32)));
    }
};

template <>
struct Format<Type::Q6_K> {
    static constexpr Type kType = Type::Q6_K;
    static constexpr int kZero = 32, kMaxCode = 63;
    static constexpr bool kSigned = false;
    static constexpr int kBytes = 210;

    template <int g, int n>
    static void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        const uint8_t *low = p + 32 * (g % 2), *high = p + 128;
        a = _mm256_or_si256(moved_bits<-4 * (g / 2), 15>(two_lanes(low, low + 64)),
                            moved_bits<4 - 2 * g, 0x30>(two_lanes(high, high + 32)));
        b = _mm256_or_si256(moved_bits<-4 * (g / 2), 15>(two_lanes(low + 16, low + 80)),
                            moved_bits<4 - 2 * g, 0x30>(two_lanes(high + 16, high + 48)));
    }
    template <int n>
    static Scales scales(const uint8_t* p) {
        Scales s = {};
        s.scale = second_half(p + 206);
        s.sub_scale = _mm256_cvtepi8_epi16(load128(p + 192));
        return s;
    }
};

template <>
struct Format<Type::Q3_K> {
    static constexpr Type kType = Type::Q3_K;
    static constexpr int kZero = 4, kMaxCode = 7;
    static constexpr bool kSigned = false;
    static constexpr int kBytes = 110;

    template <int g, int n>
    static void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        a = _mm256_or_si256(moved_bits<-2 * g, 3>(two_lanes(p + 32, p + 64)),
                            moved_bits<2 - g, 4>(bits_of_pairs(p)));
        b = _mm256_or_si256(moved_bits<-2 * g, 3>(two_lanes(p + 48, p + 80)),
                            moved_bits<2 - g, 4>(bits_of_pairs(p + 16)));
    }
    template <int n>
    static Scales scales(const uint8_t* p) {
        const uint32_t w0 = load_u32(p + 96), w1 = load_u32(p + 100), w2 = load_u32(p + 104);
        const __m128i bytes = _mm_set_epi32(int((w1 >> 4 & 0x0f0f0f0f) | (w2 >> 2 & 0x30303030)),
                                            int((w0 >> 4 & 0x0f0f0f0f) | (w2 & 0x30303030)),
                                            int((w1 & 0x0f0f0f0f) | (w2 << 2 & 0x30303030)),
                                            int((w0 & 0x0f0f0f0f) | (w2 << 4 & 0x30303030)));
        Scales s = {};
        s.scale = second_half(p + 106);
        s.sub_scale = _mm256_cvtepi8_epi16(_mm_sub_epi8(bytes, _mm_set1_epi8(32)));
        return s;
    }
};

template <>
struct Format<Type::Q2_K> {
    static constexpr Type kType = Type::Q2_K;
    static constexpr int kZero = 0, kMaxCode = 3;
    static constexpr bool kSigned = false;
    static constexpr int kBytes = 84;

    template <int g, int n>
    static void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        a = moved_bits<-2 * g, 3>(two_lanes(p + 16, p + 48));
        b = moved_bits<-2 * g, 3>(two_lanes(p + 32, p + 64));
    }
    template <int n>
    static Scales scales(const uint8_t* p) {
        const __m256i words = _mm256_cvtepu8_epi16(load128(p));
        Scales s = {};
        two_halves(p + 80, s.scale, s.min);
        s.sub_scale = _mm256_and_si256(words, _mm256_set1_epi16(15));
        s.sub_min = _mm256_srli_epi16(words, 4);
        return s;
    }
};

// Ternary types: codes 0 to 2. TQ2_0 may store 3, which is not a value.

template <>
struct Format<Type::TQ2_0> {
    static constexpr Type kType = Type::TQ2_0;
    static constexpr int kZero = 1, kMaxCode = 3;
    static constexpr bool kSigned = false;
    static constexpr int kBytes = 66;

    template <int g, int n>
    static HOTSET_INLINE void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        a = moved_bits<-2 * g, 3>(two_lanes(p, p + 32));
        b = moved_bits<-2 * g, 3>(two_lanes(p + 16, p + 48));
    }
    template <int n>
    static Scales scales(const uint8_t* p) {
        Scales s = {};
        s.scale = second_half(p + 62);
        return s;
    }
};

template <>
struct Format<Type::TQ1_0> {
    static constexpr Type kType = Type::TQ1_0;
    static constexpr int kZero = 1, kMaxCode = 2;
    static constexpr bool kSigned = false;
    static constexpr int kBytes = 54;

    // Multiply bytes by powers of three modulo 256; return the fractions' first base-3 digit.
    static __m256i digits(__m256i bytes, __m256i powers) {
        // Each byte as the high byte of a word.
        const __m256i three = _mm256_set1_epi16(3);
        const __m256i even = _mm256_mullo_epi16(_mm256_slli_epi16(bytes, 8), powers);
        const __m256i odd =
            _mm256_mullo_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(int16_t(0xff00))), powers);
        return _mm256_or_si256(_mm256_mulhi_epu16(even, three),
                               _mm256_slli_epi16(_mm256_mulhi_epu16(odd, three), 8));
    }
    static __m256i lane_powers(int first, int second) {
        return _mm256_set_m128i(_mm_set1_epi16(int16_t(second)), _mm_set1_epi16(int16_t(first)));
    }
    template <int g, int n>
    static HOTSET_INLINE void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        // Blocks j < 5 have 32 bytes and power j. The next 16 bytes have a power per half block.
        if constexpr (g == 0) {
            a = digits(broadcast128(p), lane_powers(1, 81));
            b = digits(broadcast128(p + 16), lane_powers(1, 81));
        } else if constexpr (g < 3) {
            a = digits(two_lanes(p, p + 32), g == 1 ? lane_powers(3, 1) : lane_powers(9, 9));
            b = digits(two_lanes(p + 16, p + 32), g == 1 ? lane_powers(3, 3) : lane_powers(9, 27));
        } else {
            a = digits(two_lanes(p, p + 32), lane_powers(27, 81));
            const __m128i last = _mm_set1_epi32(int(load_u32(p + 48)));
            b = digits(
                _mm256_set_m128i(last, load128(p + 16)),
                _mm256_set_m128i(_mm_setr_epi32(0x10001, 0x30003, 0x90009, 0x1b001b), _mm_set1_epi16(27)));
        }
    }
    template <int n>
    static Scales scales(const uint8_t* p) {
        Scales s = {};
        s.scale = second_half(p + 50);
        return s;
    }
};

// Lattices: codebook groups are looked up one by one and combined; then signs, one bit per weight.

// Combine sixteen groups of eight weights into the first halves, and the second halves, of two blocks.
template <class Book, class Index>
HOTSET_INLINE void look_up(const Book& book, const Index& index, __m256i& a, __m256i& b) {
    auto one = [&](int i) {
        return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(book.group + index(i)));
    };
    auto two = [&](int i) { return _mm_unpacklo_epi64(one(i), one(i + 1)); };
    a = _mm256_inserti128_si256(_mm256_castsi128_si256(two(0)), two(4), 1);
    b = _mm256_inserti128_si256(_mm256_castsi128_si256(two(2)), two(6), 1);
}

// The same with groups of four weights.
template <class Book, class Index>
HOTSET_INLINE void look_up_fours(const Book& book, const Index& index, __m256i& a, __m256i& b) {
    auto one = [&](int i) {
        return _mm_castps_si128(_mm_load_ss(reinterpret_cast<const float*>(book.group + index(i))));
    };
    auto two = [&](int i) { return _mm_unpacklo_epi32(one(i), one(i + 1)); };
    auto four = [&](int i) { return _mm_unpacklo_epi64(two(i), two(i + 2)); };
    a = _mm256_inserti128_si256(_mm256_castsi128_si256(four(0)), four(8), 1);
    b = _mm256_inserti128_si256(_mm256_castsi128_si256(four(4)), four(12), 1);
}

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

// kZero plus the weights of blocks g and g + 4, negative where `signs` (32 bits per block) is set.
template <int g, int kZero>
HOTSET_INLINE void put_signs(__m256i signs, __m256i& a, __m256i& b) {
    constexpr int64_t kOnes = 0x0101010101010101;
    const __m256i zero = _mm256_set1_epi8(kZero);
    auto put = [&](__m256i weights, __m256i pick) {
        const __m256i each = _mm256_set1_epi64x(int64_t(0x8040201008040201));
        const __m256i minus =
            _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(signs, pick), each), each);
        return _mm256_add_epi8(_mm256_sub_epi8(_mm256_xor_si256(weights, minus), minus), zero);
    };
    constexpr int64_t kFirst = 4 * g * kOnes;
    a = put(a, _mm256_setr_epi64x(kFirst, kFirst + kOnes, kFirst, kFirst + kOnes));
    b = put(b, _mm256_setr_epi64x(kFirst + 2 * kOnes, kFirst + 3 * kOnes, kFirst + 2 * kOnes,
                                  kFirst + 3 * kOnes));
}

// The signs of a super-block. Each format computes all of them for every pair of blocks; the compiler does it
// once.

// Add the eighth sign to bytes of seven signs, which makes the number of negative ones even.
HOTSET_INLINE __m256i eighth_signs(__m256i seven) {
    const __m256i odd = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0));
    const __m256i low = _mm256_shuffle_epi8(odd, low_nibbles(seven));
    return _mm256_xor_si256(seven, _mm256_xor_si256(low, _mm256_shuffle_epi8(odd, high_nibbles(seven))));
}

// Return the signs from words of four times seven signs.
HOTSET_INLINE __m256i signs_of_words(__m256i words) {
    const __m256i mask = _mm256_set1_epi32(0x7f);
    const __m256i low =
        _mm256_or_si256(_mm256_and_si256(words, mask),
                        _mm256_and_si256(_mm256_slli_epi32(words, 1), _mm256_slli_epi32(mask, 8)));
    const __m256i high =
        _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi32(words, 2), _mm256_slli_epi32(mask, 16)),
                        _mm256_and_si256(_mm256_slli_epi32(words, 3), _mm256_slli_epi32(mask, 24)));
    return eighth_signs(_mm256_or_si256(low, high));
}

inline uint64_t load_u64(const uint8_t* p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

// Return 2s + 1 for integers s, times the unit.
inline __m256 odd_scales(float unit, __m256i s) {
    const __m256i odd = _mm256_add_epi32(_mm256_add_epi32(s, s), _mm256_set1_epi32(1));
    return _mm256_mul_ps(_mm256_set1_ps(unit), _mm256_cvtepi32_ps(odd));
}

// Return the scales of sixteen weights of IQ2_XS and IQ2_S, stored as nibbles.
inline Scales nibble_scales(const uint8_t* p, const uint8_t* bytes) {
    const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
    const __m128i nibble = _mm_set1_epi8(15);
    const __m256i s = _mm256_cvtepu8_epi16(
        _mm_unpacklo_epi8(_mm_and_si128(packed, nibble), _mm_and_si128(_mm_srli_epi16(packed, 4), nibble)));
    Scales out = {};
    out.scale = _mm256_set1_ps(half(load_u16(p)) * 0.125f);
    out.sub_scale = _mm256_add_epi16(_mm256_add_epi16(s, s), _mm256_set1_epi16(1));
    return out;
}

template <>
struct Format<Type::IQ2_XXS> {
    static constexpr Type kType = Type::IQ2_XXS;
    static constexpr int kZero = 64, kMaxCode = 64 + 43;
    static constexpr bool kSigned = false;
    static constexpr int kBytes = 66;

    template <int g, int n>
    static HOTSET_INLINE void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        const uint8_t* s = p + 2 + 8 * g;
        look_up(kIq2Xxs, [s](int i) { return s[i / 4 * 32 + i % 4]; }, a, b);
        put_signs<g, kZero>(signs_of_words(words(p)), a, b);
    }
    // Return the words with signs and scales: every other word.
    static HOTSET_INLINE __m256i words(const uint8_t* p) {
        const __m256 first = _mm256_castsi256_ps(load256(p + 2)), last = _mm256_castsi256_ps(load256(p + 34));
        const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(first, last, 0xdd));  // 0 1 4 5 | 2 3 6 7
        return _mm256_permute4x64_epi64(odd, 0xd8);
    }
    template <int n>
    static Scales scales(const uint8_t* p) {
        Scales s = {};
        s.scale = odd_scales(half(load_u16(p)) * 0.125f, _mm256_srli_epi32(words(p), 28));
        return s;
    }
};

template <>
struct Format<Type::IQ2_XS> {
    static constexpr Type kType = Type::IQ2_XS;
    static constexpr int kZero = 64, kMaxCode = 64 + 43;
    static constexpr bool kSigned = false;
    static constexpr int kBytes = 74;

    template <int g, int n>
    static HOTSET_INLINE void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        const uint8_t* s = p + 2 + 8 * g;
        look_up(kIq2Xs, [s](int i) { return load_u16(s + i / 4 * 32 + i % 4 * 2) & 511; }, a, b);
        const __m256i seven =
            _mm256_packus_epi16(_mm256_srli_epi16(load256(p + 2), 9), _mm256_srli_epi16(load256(p + 34), 9));
        put_signs<g, kZero>(eighth_signs(_mm256_permute4x64_epi64(seven, 0xd8)), a, b);
    }
    template <int n>
    static Scales scales(const uint8_t* p) {
        return nibble_scales(p, p + 66);
    }
};

template <>
struct Format<Type::IQ2_S> {
    static constexpr Type kType = Type::IQ2_S;
    static constexpr int kZero = 64, kMaxCode = 64 + 43;
    static constexpr bool kSigned = false;
    static constexpr int kBytes = 82;

    template <int g, int n>
    static void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        const uint8_t* s = p + 2 + 4 * g;
        const uint32_t high = p[66 + g] | p[70 + g] << 8;
        look_up(
            kIq2S, [s, high](int i) { return s[i / 4 * 16 + i % 4] | (high << 8 >> (2 * i) & 0x300); }, a, b);
        put_signs<g, kZero>(load256(p + 34), a, b);
    }
    template <int n>
    static Scales scales(const uint8_t* p) {
        return nibble_scales(p, p + 74);
    }
};

template <>
struct Format<Type::IQ3_XXS> {
    static constexpr Type kType = Type::IQ3_XXS;
    static constexpr int kZero = 64, kMaxCode = 64 + 62;
    static constexpr bool kSigned = false;
    static constexpr int kBytes = 98;

    template <int g, int n>
    static HOTSET_INLINE void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        const uint8_t* s = p + 2 + 8 * g;
        look_up_fours(kIq3Xxs, [s](int i) { return s[i / 8 * 32 + i % 8]; }, a, b);
        put_signs<g, kZero>(signs_of_words(load256(p + 66)), a, b);
    }
    template <int n>
    static Scales scales(const uint8_t* p) {
        Scales s = {};
        s.scale = odd_scales(half(load_u16(p)) * 0.25f, _mm256_srli_epi32(load256(p + 66), 28));
        return s;
    }
};

template <>
struct Format<Type::IQ3_S> {
    static constexpr Type kType = Type::IQ3_S;
    static constexpr int kZero = 16, kMaxCode = 16 + 15;
    static constexpr bool kSigned = false;
    static constexpr int kBytes = 110;

    template <int g, int n>
    static HOTSET_INLINE void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        const __m256i each =
            _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
        const __m256i bits = _mm256_and_si256(_mm256_set1_epi16(int16_t(p[66 + g] | p[70 + g] << 8)), each);
        const __m256i high = _mm256_and_si256(_mm256_cmpeq_epi16(bits, each), _mm256_set1_epi16(256));
        const __m256i low = _mm256_cvtepu8_epi16(_mm_set_epi64x(int64_t(load_u64(p + 34 + 8 * g)),  //
                                                                int64_t(load_u64(p + 2 + 8 * g))));
        look_up_fours(kIq3S, Indices(_mm256_or_si256(low, high)), a, b);
        put_signs<g, kZero>(load256(p + 74), a, b);
    }
    template <int n>
    static Scales scales(const uint8_t* p) {
        const __m256i nibbles = _mm256_srlv_epi32(_mm256_set1_epi32(int(load_u32(p + 106))),
                                                  _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
        Scales s = {};
        s.scale = odd_scales(half(load_u16(p)), _mm256_and_si256(nibbles, _mm256_set1_epi32(15)));
        return s;
    }
};

template <>
struct Format<Type::IQ1_S> {
    static constexpr Type kType = Type::IQ1_S;
    static constexpr int kZero = kIq1Zero, kMaxCode = kIq1Zero + 9;
    static constexpr bool kSigned = false;
    static constexpr int kBytes = 50;

    template <int g, int n>
    static void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        const uint8_t* s = p + 2 + 4 * g;
        const uint32_t high[2] = {load_u16(p + 34 + 2 * g), load_u16(p + 42 + 2 * g)};
        look_up(
            kIq1, [&](int i) { return s[i / 4 * 16 + i % 4] | (high[i / 4] >> (3 * (i % 4)) & 7) << 8; }, a,
            b);
        const __m128i negative = _mm_srai_epi16(_mm_cvtsi32_si128(int(high[0] | high[1] << 16)), 15);
        const __m256i minus = _mm256_set_m128i(_mm_shuffle_epi8(negative, _mm_set1_epi8(2)),
                                               _mm_shuffle_epi8(negative, _mm_setzero_si128()));
        const __m256i deltas = _mm256_and_si256(minus, _mm256_set1_epi8(2));
        a = _mm256_sub_epi8(a, deltas);
        b = _mm256_sub_epi8(b, deltas);
    }
    template <int n>
    static Scales scales(const uint8_t* p) {
        const __m256i words = _mm256_cvtepu16_epi32(load128(p + 34));
        Scales s = {};
        s.scale = odd_scales(half(load_u16(p)) * 0.125f,
                             _mm256_and_si256(_mm256_srli_epi32(words, 12), _mm256_set1_epi32(7)));
        return s;
    }
};

template <>
struct Format<Type::IQ1_M> {
    static constexpr Type kType = Type::IQ1_M;
    static constexpr int kZero = kIq1Zero, kMaxCode = kIq1Zero + 9;
    static constexpr bool kSigned = false;
    static constexpr int kBytes = 56;

    template <int g, int n>
    static void unpack(const uint8_t* p, __m256i& a, __m256i& b) {
        const uint8_t* s = p + 4 * g;
        const uint32_t high = load_u16(p + 32 + 2 * g) | uint32_t(load_u16(p + 40 + 2 * g)) << 16;  // nibbles
        look_up(kIq1, [s, high](int i) { return s[i / 4 * 16 + i % 4] | (high >> (4 * i) & 7) << 8; }, a, b);
        // Take the nibbles of the first halves' groups (0 1 4 5), then of the second halves' (2 3 6 7). If
        // bit 3 is set, 2 is subtracted.
        auto minus = [high](__m256i weights, int i, int j, int k, int l) {
            const __m256i shift = _mm256_setr_epi64x(i, j, k, l);
            const __m256i bits = _mm256_srlv_epi64(_mm256_set1_epi64x(int64_t(high)), shift);
            const __m256i set = _mm256_and_si256(bits, _mm256_set1_epi64x(2));
            return _mm256_sub_epi8(
                weights,
                _mm256_shuffle_epi8(set, _mm256_setr_epi64x(0, 0x0808080808080808, 0, 0x0808080808080808)));
        };
        a = minus(a, 2, 6, 18, 22);
        b = minus(b, 10, 14, 26, 30);
    }
    template <int n>
    static Scales scales(const uint8_t* p) {
        const __m256i words =
            _mm256_shuffle_epi8(_mm256_set1_epi64x(int64_t(load_u64(p + 48))),
                                _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3,  //
                                                 4, 5, 4, 5, 4, 5, 4, 5, 6, 7, 6, 7, 6, 7, 6, 7));
        // A word has a field of three bits: move it to the top, and down as twice its value.
        const __m256i top = _mm256_mullo_epi16(words, _mm256_set1_epi64x(0x0010008004002000));
        const __m256i twice = _mm256_and_si256(_mm256_srli_epi16(top, 12), _mm256_set1_epi16(14));
        Scales s = {};
        s.scale = _mm256_set1_ps(scale_iq1_m(p + 48) * 0.125f);
        s.sub_scale = _mm256_or_si256(twice, _mm256_set1_epi16(1));
        return s;
    }
};

// Add minimums times their sums to the total.
template <class Format>
inline __m256 add_min(__m256 min, __m256 sum, __m256 total) {
    return type_facts(Format::kType).block_size == 32 ? _mm256_fmadd_ps(min, sum, total)
                                                      : _mm256_fnmadd_ps(min, sum, total);
}

// The number of maddubs results that may be added in int16.
template <class Format>
constexpr int kInt16Terms = 32767 / (254 * Format::kMaxCode);

inline __m256i ones() {
    return _mm256_set1_epi16(1);
}

// Multiply lanes, whose last three bits are zero, by kCount / 8. Eighths cost nothing. Saving two
// instructions per 256 products gains 3% in cache and 7% when rows come from memory (Q4_0).
template <int kCount>
inline __m256i eighths(__m256i v) {
    constexpr int kLeft = log2_of(kCount) - 3;
    if constexpr (kLeft > 0) return _mm256_slli_epi32(v, kLeft);
    if constexpr (kLeft < 0) return _mm256_srai_epi32(v, -kLeft);
    return v;
}

// The weights of the two halves' input sums in a block's integer dot product, or in its minimum: int16, two
// per lane.
template <class Format>
inline __m256i sum_weights(const Scales& s) {
    if constexpr (has_min(Format::kType)) return s.sub_min;
    return _mm256_slli_epi16(s.sub_scale, log2_of(Format::kZero));  // at most 128 * 32
}

// ---- One token

struct TokenInputs {
    const int8_t* q;
    const float* scale;
    const float* sum;
    const int32_t* isum0;
    const int32_t* isum1;
    const int32_t* isum8;
};

// The int16 scales of half h of blocks g and g + 4, each filling a 128-bit lane.
template <int g, int h>
inline __m256i pair_scales(__m256i sub_scale) {
    constexpr int kAt = 4 * g + 2 * h;
    return _mm256_shuffle_epi8(sub_scale, _mm256_set1_epi16(kAt | (kAt + 1) << 8));
}

// Multiply a vector of codes and their inputs; pairs are added in int16.
template <class Format>
inline __m256i products(__m256i codes, const int8_t* q) {
    if constexpr (Format::kSigned)
        return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(load256(q), codes));
    else
        return _mm256_maddubs_epi16(codes, load256(q));
}

// Add the halves of two vectors' 128-bit lanes, first a's, then b's; and their quarters, pairwise. Equal
// to hadd, in half the time on some processors.
template <class Add>
inline __m256i add_halves(__m256i a, __m256i b, Add add) {
    return add(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}
template <class Add>
inline __m256i add_quarters(__m256i a, __m256i b, Add add) {
    const __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
    return add(_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88)),
               _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xdd)));
}
inline __m256i add16(__m256i a, __m256i b) {
    return _mm256_add_epi16(a, b);
}
inline __m256i add32(__m256i a, __m256i b) {
    return _mm256_add_epi32(a, b);
}

// Whether the partial sums of a pair of blocks fit into int16.
template <class Format>
constexpr bool kNarrowSums = kInt16Terms<Format> >= (has_sub_blocks(Format::kType) ? 8 : 4);

// Compute the partial sums of blocks g and g + 4 for T tokens, each block in its 128-bit lane. They are eight
// int16 if the codes allow it (alternately of the first and second half if these have scales), otherwise four
// int32. q: the tokens' inputs of the eight blocks.
template <class Format, int g, int n, int T>
HOTSET_INLINE void pair_sums(const uint8_t* p, const int8_t* const (&q)[T], __m256i sub_scale,
                             __m256i (&sums)[T]) {
    constexpr bool kSub = has_sub_blocks(Format::kType);
    __m256i a, b;
    if constexpr (g < n) Format::template unpack<g, n>(p, a, b);
    for (int t = 0; t < T; t++) {
        if constexpr (g >= n) {
            sums[t] = _mm256_setzero_si256();
            continue;
        }
        const __m256i x = products<Format>(a, q[t] + half_at(kInterleaved, g, 0)),
                      y = products<Format>(b, q[t] + half_at(kInterleaved, g, 1));
        if constexpr (kSub && kNarrowSums<Format>)
            sums[t] = add16(_mm256_unpacklo_epi16(x, y), _mm256_unpackhi_epi16(x, y));
        else if constexpr (kNarrowSums<Format>)
            sums[t] = add16(x, y);
        else
            sums[t] = add32(_mm256_madd_epi16(x, kSub ? pair_scales<g, 0>(sub_scale) : ones()),
                            _mm256_madd_epi16(y, kSub ? pair_scales<g, 1>(sub_scale) : ones()));
    }
}

// Add the halves of the partial sums of blocks g, g + 4, g + 1 and g + 5.
template <class Format, int g, int n, int T>
HOTSET_INLINE void four_sums(const uint8_t* p, const int8_t* const (&q)[T], __m256i sub_scale,
                             __m256i (&sums)[T]) {
    __m256i next[T];
    pair_sums<Format, g, n>(p, q, sub_scale, sums);
    pair_sums<Format, g + 1, n>(p, q, sub_scale, next);
    for (int t = 0; t < T; t++) sums[t] = add_halves(sums[t], next[t], kNarrowSums<Format> ? add16 : add32);
}

// Compute the integer dot products of the n blocks with T tokens, one lane per block, including sub-scales
// but without the codes' offset. Sums are widened to int32 as late as the codes allow.
template <class Format, int n, int T>
HOTSET_INLINE void block_dots(const uint8_t* p, const int8_t* const (&q)[T], __m256i sub_scale,
                              __m256i (&dots)[T]) {
    constexpr bool kSub = has_sub_blocks(Format::kType);
    __m256i last[T];
    four_sums<Format, 0, n>(p, q, sub_scale, dots);
    four_sums<Format, 2, n>(p, q, sub_scale, last);
    for (int t = 0; t < T; t++) {
        if constexpr (kInt16Terms<Format> >= 8)
            dots[t] = _mm256_madd_epi16(add_quarters(dots[t], last[t], add16), kSub ? sub_scale : ones());
        else if constexpr (kNarrowSums<Format>)
            dots[t] =
                add_quarters(_mm256_madd_epi16(dots[t], ones()), _mm256_madd_epi16(last[t], ones()), add32);
        else
            dots[t] = add_quarters(dots[t], last[t], add32);
    }
}

// Whether scales are decoded before the dot products: sub-scales are needed there, and codes that need little
// unpacking leave registers for it. For other types this order costs 3 to 8%.
template <class Format>
constexpr bool kScalesFirst = has_sub_blocks(Format::kType) || Format::kType == Type::Q4_0 ||
                              Format::kType == Type::Q4_1 || Format::kType == Type::Q8_0;

// Add n <= 8 blocks of one row, times T tokens, to acc, one lane per block. Force-inlined, like `dot_lanes`:
// the larger this file, the earlier GCC makes it a call, which costs 5 to 15% of a token.
template <class Format, int n, int T>
HOTSET_INLINE void add_blocks(const uint8_t* p, const TokenInputs (&x)[T], int64_t b, __m256 (&acc)[T]) {
    constexpr bool kMin = has_min(Format::kType), kSub = has_sub_blocks(Format::kType);
    Scales s = {};
    const int8_t* q[T];
    __m256i dots[T];
    for (int t = 0; t < T; t++) q[t] = x[t].q + b * 32;
    if constexpr (kScalesFirst<Format>) s = Format::template scales<n>(p);
    block_dots<Format, n>(p, q, s.sub_scale, dots);
    if constexpr (!kScalesFirst<Format>) s = Format::template scales<n>(p);
    for (int t = 0; t < T; t++) {
        const __m256 input = _mm256_loadu_ps(x[t].scale + b);
        __m256i dot = dots[t], by_sum = _mm256_setzero_si256();
        if constexpr (kSub) {
            const __m256i second = _mm256_slli_epi32(load256(x[t].isum1 + b), 16);
            const __m256i sums = _mm256_blend_epi16(load256(x[t].isum0 + b), second, 0xaa);
            by_sum = _mm256_madd_epi16(sums, sum_weights<Format>(s));
            if constexpr (!kMin) dot = _mm256_sub_epi32(dot, by_sum);
        } else if constexpr (Format::kZero != 0) {
            dot = _mm256_sub_epi32(dot, eighths<Format::kZero>(load256(x[t].isum8 + b)));
        }
        __m256 total = _mm256_fmadd_ps(_mm256_mul_ps(s.scale, input), _mm256_cvtepi32_ps(dot), acc[t]);
        if constexpr (kMin && kSub)
            total = add_min<Format>(_mm256_mul_ps(s.min, input), _mm256_cvtepi32_ps(by_sum), total);
        else if constexpr (kMin)
            total = add_min<Format>(s.min, _mm256_loadu_ps(x[t].sum + b), total);
        acc[t] = _mm256_blend_ps(acc[t], total, (1 << n) - 1);
    }
}

// Bytes from a row's blocks to those that are prefetched meanwhile (decision 008).
constexpr int kAhead = 4096;

// kOnce: only these tokens read the data.
template <bool kOnce>
HOTSET_INLINE void prefetch(const uint8_t* p, int bytes) {
    for (int at = 0; at < bytes; at += 64) {
        if constexpr (kOnce)
            V::fetch_once(p + at);
        else
            V::fetch(p + at);
    }
}

// Compute the sixteen lanes of a row's dot products with T tokens. kTail: see by_tail. ahead: data as long as
// the row, to prefetch meanwhile.
template <class Format, int kTail, bool kOnce, int T>
HOTSET_INLINE void dot_lanes(const uint8_t* p, const uint8_t* ahead, int64_t blocks,
                             const TokenInputs (&x)[T], V (&lanes)[T]) {
    __m256 lo[T], hi[T];
    for (int t = 0; t < T; t++) lo[t] = hi[t] = _mm256_setzero_ps();
    int64_t b = 0;
    if constexpr (kTail == 24) blocks = 24;
    for (; b + 16 <= blocks; b += 16, p += 2 * Format::kBytes, ahead += 2 * Format::kBytes) {
        prefetch<kOnce>(ahead, 2 * Format::kBytes);
        add_blocks<Format, 8>(p, x, b, lo);
        add_blocks<Format, 8>(p + Format::kBytes, x, b + 8, hi);
    }
    const bool one_more = kTail % 8 == 0 ? kTail != 0 : b + 8 <= blocks;
    if (one_more) {
        prefetch<kOnce>(ahead, Format::kBytes);
        add_blocks<Format, 8>(p, x, b, lo);
        p += Format::kBytes;
        ahead += Format::kBytes;
        b += 8;
    }
    if constexpr (kTail % 8 != 0) {
        prefetch<kOnce>(ahead, kTail * Format::kBytes / 8);
        if (one_more)
            add_blocks<Format, kTail>(p, x, b, hi);
        else
            add_blocks<Format, kTail>(p, x, b, lo);
    }
    for (int t = 0; t < T; t++) lanes[t] = {lo[t], hi[t]};
}

// Call f<kTail>(). 0 and 8 are blocks % 16; 1 to 7 are blocks % 8, if the type allows it, with or without
// eight before; 24 means exactly 24 blocks (common in MoE models: without a loop a tenth faster). `blocks` is
// a multiple of kStep.
template <class Format, int kStep, class F>
HOTSET_INLINE auto by_tail(int64_t blocks, F f) {
    if constexpr (type_facts(Format::kType).block_size < 256) {
        switch (blocks % 8) {
            case 2:
                return f.template operator()<2>();
            case 4:
                return f.template operator()<4>();
            case 6:
                return f.template operator()<6>();
        }
        if constexpr (kStep == 1) {
            switch (blocks % 8) {
                case 1:
                    return f.template operator()<1>();
                case 3:
                    return f.template operator()<3>();
                case 5:
                    return f.template operator()<5>();
                case 7:
                    return f.template operator()<7>();
            }
        }
    }
    if (blocks == 24) return f.template operator()<24>();
    if (blocks % 16 == 8) return f.template operator()<8>();
    return f.template operator()<0>();
}

inline TokenInputs inputs_of(const Inputs& x, int token) {
    const int64_t width = padded(x.k);
    const int32_t* isum = x.isum + token * (width / 16);
    return {x.q + token * width, x.scale + token * (width / 32), x.sum + token * (width / 32), isum,
            isum + width / 32,   x.isum8 + token * (width / 32)};
}

// Multiply one row by one token.
template <class Format>
inline float one_row(const Matrix&, const uint8_t* row, const Inputs& x, int token, const uint8_t* ahead) {
    const TokenInputs inputs[1] = {inputs_of(x, token)};
    return by_tail<Format, 1>(x.k / 32, [&]<int kTail>() {
        V lanes[1];
        dot_lanes<Format, kTail, false>(row, ahead, x.k / 32, inputs, lanes);
        return sum(lanes[0]);
    });
}

// few_tokens<T> takes rows of a multiple of these blocks: few models have odd ones, and each width adds to
// the time of the build.
template <int T>
constexpr int kFewStep = T == 1 ? 1 : 2;

// The types of most files, whose products with two tokens are few_tokens<2>.
template <class Format>
constexpr bool kTakesTwo = [] {
    constexpr Type kTypes[] = {Type::Q4_0, Type::Q4_1, Type::Q5_0,   Type::Q8_0,  Type::Q4_K,
                               Type::Q5_K, Type::Q6_K, Type::IQ4_NL, Type::IQ4_XS};
    return std::find(std::begin(kTypes), std::end(kTypes), Format::kType) != std::end(kTypes);
}();

// Multiply rows one after another by T tokens, the first of which is t0. One call per row would take a fifth
// of the time of short rows.
template <class Format, bool kOnce, int T>
void few_tokens(const Matrix& w, int64_t row0, int64_t row1, const Inputs& x, int t0, float* out,
                int64_t ld) {
    TokenInputs inputs[T];
    for (int t = 0; t < T; t++) inputs[t] = inputs_of(x, t0 + t);
    by_tail<Format, kFewStep<T>>(x.k / 32, [&]<int kTail>() {
        // Only one place computes a row's products: with a second one GCC makes it a call.
        V lanes[T][4];
        int n = 0;
        for (int64_t r = row0; r < row1; r++) {
            V row[T];
            dot_lanes<Format, kTail, kOnce>(w.row(r), w.row(r) + kAhead, x.k / 32, inputs, row);
            for (int t = 0; t < T; t++) lanes[t][n] = row[t];
            if (++n < 4) continue;
            for (int t = 0; t < T; t++) sums(lanes[t], out + t * ld + r - 3 - row0);
            n = 0;
        }
        for (int t = 0; t < T; t++)
            for (int i = 0; i < n; i++) out[t * ld + row1 - row0 - n + i] = sum(lanes[t][i]);
    });
}

// ---- Several tokens
//
// As for one token, but the codes of eight blocks are transposed: word i of each block is in vector i, one
// lane per block. The inputs are transposed once per call. Per token only the products are left.

constexpr int kRows = 8;         // rows that share a pass over the inputs
constexpr int kTileTokens = 32;  // tokens that share a row's unpacking; more exceed the first-level cache

// Eight blocks of a row, one lane each.
struct Blocks {
    __m256i codes[8];       // four bytes of each block
    __m256i magnitudes[8];  // of signed codes
    __m256i sub_scale[2];   // int16: the first half's scale twice per lane, and the second half's
    __m256i by_sum;         // int16: sum_weights()
    __m256 scale;
    __m256 min;
};

// Separate pairs of int16 scales of halves.
inline void split_sub_scale(__m256i both, __m256i out[2]) {
    const __m256i shifted = _mm256_slli_epi32(both, 16);
    out[0] = _mm256_blend_epi16(_mm256_srli_epi32(shifted, 16), shifted, 0xaa);
    out[1] = _mm256_blend_epi16(_mm256_srli_epi32(both, 16), both, 0xaa);
}

// Eight blocks of one token.
struct BlockInputs {
    __m256i words[8];
    __m256 scale;
    __m256i sums;  // as the format needs: float sums, or corrections
};

// Return a format's data of a token's block in addition to its products. With minimums: the sum (as a float's
// bits). Otherwise, from the sums of its halves: kZero times both or, with sub-blocks, both as int16.
template <class Format>
inline int32_t block_sums(const Inputs& x, int token, int64_t b) {
    const int64_t blocks = padded(x.k) / 32;
    if constexpr (has_min(Format::kType) && !has_sub_blocks(Format::kType))
        return std::bit_cast<int32_t>(x.sum[token * blocks + b]);
    const uint32_t isum0 = uint32_t(x.isum[2 * token * blocks + b]),
                   isum1 = uint32_t(x.isum[(2 * token + 1) * blocks + b]);
    if constexpr (has_sub_blocks(Format::kType)) return int32_t((isum0 & 0xffff) | isum1 << 16);
    return int32_t(uint32_t(Format::kZero) * (isum0 + isum1));
}

// Sum the products of kCount words, starting at kFirst, in int16, strictly one after another. If the compiler
// makes a tree of the sum, the open terms push codes out of registers, and loads are the bottleneck.
template <int kFirst, int kCount>
HOTSET_INLINE __m256i sum_of_products(const __m256i codes[8], const __m256i words[8]) {
    __m256i sum = _mm256_maddubs_epi16(codes[kFirst], words[kFirst]);
    for (int i = kFirst + 1; i < kFirst + kCount; i++) {
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes[i], words[i]));
#ifndef _MSC_VER
        asm("" : "+x"(sum));
#endif
    }
    return sum;
}

// Sum the products of kCount words as int32, after madd with `by`; widen as late as the codes allow.
template <class Format, int kFirst, int kCount = 4>
HOTSET_INLINE __m256i wide_sum(const __m256i codes[8], const __m256i words[8], __m256i by) {
    if constexpr (kCount <= kInt16Terms<Format>)
        return _mm256_madd_epi16(sum_of_products<kFirst, kCount>(codes, words), by);
    else
        return _mm256_add_epi32(wide_sum<Format, kFirst, kCount / 2>(codes, words, by),
                                wide_sum<Format, kFirst + kCount / 2, kCount / 2>(codes, words, by));
}

// Compute the integer dot products without the codes' offset.
template <class Format>
HOTSET_INLINE __m256i dots(const Blocks& blocks, const __m256i words[8]) {
#ifdef HOTSET_AVX_VNNI
    __m256i first = _mm256_setzero_si256(), second = first;
    for (int i = 0; i < 4; i++) {
        first = _mm256_dpbusd_avx_epi32(first, blocks.codes[i], words[i]);
        second = _mm256_dpbusd_avx_epi32(second, blocks.codes[4 + i], words[4 + i]);
    }
    return _mm256_add_epi32(first, second);
#else
    if constexpr (Format::kSigned) {
        __m256i total = _mm256_setzero_si256();
        for (int i = 0; i < 8; i++) {
            const __m256i pairs =
                _mm256_maddubs_epi16(blocks.magnitudes[i], _mm256_sign_epi8(words[i], blocks.codes[i]));
            total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, ones()));
        }
        return total;
    } else if constexpr (has_sub_blocks(Format::kType)) {
        return _mm256_add_epi32(wide_sum<Format, 0>(blocks.codes, words, blocks.sub_scale[0]),
                                wide_sum<Format, 4>(blocks.codes, words, blocks.sub_scale[1]));
    } else if constexpr (kInt16Terms<Format> >= 8) {
        return _mm256_madd_epi16(_mm256_add_epi16(sum_of_products<0, 4>(blocks.codes, words),
                                                  sum_of_products<4, 4>(blocks.codes, words)),
                                 ones());
    } else {
        return _mm256_add_epi32(wide_sum<Format, 0>(blocks.codes, words, ones()),
                                wide_sum<Format, 4>(blocks.codes, words, ones()));
    }
#endif
}

// Add the products with a token to acc.
template <class Format>
HOTSET_INLINE __m256 add_products(const Blocks& blocks, const BlockInputs& x, __m256 acc) {
    constexpr bool kMin = has_min(Format::kType), kSub = has_sub_blocks(Format::kType);
    __m256i dot = dots<Format>(blocks, x.words), by_sum = _mm256_setzero_si256();
    if constexpr (kSub) by_sum = _mm256_madd_epi16(blocks.by_sum, x.sums);
    if constexpr (kSub && !kMin)
        dot = _mm256_sub_epi32(dot, by_sum);
    else if constexpr (Format::kZero != 0)
        dot = _mm256_sub_epi32(dot, x.sums);
    const __m256 total = _mm256_fmadd_ps(_mm256_mul_ps(blocks.scale, x.scale), _mm256_cvtepi32_ps(dot), acc);
    if constexpr (kMin && kSub)
        return add_min<Format>(_mm256_mul_ps(blocks.min, x.scale), _mm256_cvtepi32_ps(by_sum), total);
    else if constexpr (kMin)
        return add_min<Format>(blocks.min, _mm256_castsi256_ps(x.sums), total);
    else
        return total;
}

// Copy eight blocks at the end of the mapped file to where all can be read.
template <class Format>
inline const uint8_t* readable(const uint8_t* p, int n, const uint8_t* end, uint8_t* copy) {
    if (Format::kBytes <= end - p) return p;
    const size_t bytes = size_t(n) * Format::kBytes / 8;
    memcpy(copy, p, bytes);
    memset(copy + bytes, 0, Format::kBytes - bytes);
    return copy;
}

// Transpose: v[g] has four words of blocks g and g + 4; the result has word i of all eight blocks in v[i].
inline void transpose_words(__m256i v[4]) {
    const __m256i ab_lo = _mm256_unpacklo_epi32(v[0], v[1]), ab_hi = _mm256_unpackhi_epi32(v[0], v[1]);
    const __m256i cd_lo = _mm256_unpacklo_epi32(v[2], v[3]), cd_hi = _mm256_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm256_unpacklo_epi64(ab_lo, cd_lo);
    v[1] = _mm256_unpackhi_epi64(ab_lo, cd_lo);
    v[2] = _mm256_unpacklo_epi64(ab_hi, cd_hi);
    v[3] = _mm256_unpackhi_epi64(ab_hi, cd_hi);
}

// out: [steps of eight blocks][n].
template <class Format>
inline void transpose_inputs(const Inputs& x, int t0, int n, BlockInputs* out) {
    const int64_t blocks = x.k / 32, width = padded(x.k);
    for (int t = 0; t < n; t++) {
        const int8_t* q = x.q + (t0 + t) * width;
        for (int64_t b = 0; b < blocks; b += 8) {
            BlockInputs& to = out[b / 8 * n + t];
            for (int half = 0; half < 2; half++) {
                for (int g = 0; g < 4; g++)
                    to.words[4 * half + g] = load256(q + b * 32 + half_at(kInterleaved, g, half));
                transpose_words(to.words + 4 * half);
            }
            to.scale = _mm256_loadu_ps(x.scale + (t0 + t) * (width / 32) + b);
            alignas(32) int32_t numbers[8];
            for (int i = 0; i < 8; i++) numbers[i] = block_sums<Format>(x, t0 + t, b + i);
            to.sums = load256(numbers);
        }
    }
}

template <class Format>
HOTSET_INLINE void unpack_blocks(const uint8_t* p, Blocks& blocks) {
    constexpr bool kMin = has_min(Format::kType), kSub = has_sub_blocks(Format::kType);
    Format::template unpack<0, 8>(p, blocks.codes[0], blocks.codes[4]);
    Format::template unpack<1, 8>(p, blocks.codes[1], blocks.codes[5]);
    Format::template unpack<2, 8>(p, blocks.codes[2], blocks.codes[6]);
    Format::template unpack<3, 8>(p, blocks.codes[3], blocks.codes[7]);
    transpose_words(blocks.codes);
    transpose_words(blocks.codes + 4);
    if constexpr (Format::kSigned)
        for (int i = 0; i < 8; i++) blocks.magnitudes[i] = _mm256_abs_epi8(blocks.codes[i]);
    const Scales s = Format::template scales<8>(p);
    blocks.scale = s.scale;
    if constexpr (kMin) blocks.min = s.min;
    if constexpr (kSub) {
        blocks.by_sum = sum_weights<Format>(s);
        split_sub_scale(s.sub_scale, blocks.sub_scale);
    }
}

// Add the first n of eight blocks at p, times each token, to half h of the token's acc. kWhole: n is 8.
template <class Format, bool kWhole>
HOTSET_INLINE void add_to_tokens(const uint8_t* p, int n, const BlockInputs* x, int tokens, V* acc, int h) {
    Blocks blocks;
    unpack_blocks<Format>(p, blocks);
    // Other lanes are undefined and may be NaN: they are masked, not multiplied by zero.
    const __m256 lanes = _mm256_castsi256_ps(V::below(n));
    __m256* sums = h ? &acc->hi : &acc->lo;
    for (int t = 0; t < tokens; t++, sums += 2) {
        const __m256 total = add_products<Format>(blocks, x[t], *sums);
        *sums = kWhole ? total : _mm256_blendv_ps(*sums, total, lanes);
    }
}

// For at most kTileTokens tokens.
template <class Format>
void several(const Matrix& w, int64_t row0, int64_t row1, const Inputs& x, int t0, int n, float* out,
             int64_t ld, uint8_t* scratch) {
    static_assert(kRows % 4 == 0);
    // Bytes per input of a tile; kernel_scratch_bytes() reserves more.
    static_assert(sizeof(BlockInputs) * kTileTokens / 256 < kPanelRows);
    BlockInputs* inputs = reinterpret_cast<BlockInputs*>(scratch);
    transpose_inputs<Format>(x, t0, n, inputs);
    const int64_t blocks = x.k / 32;
    // Prefetched in the order of the rows.
    const uint8_t* ahead = w.row(row0) + (kRows - 1) * w.row_bytes + kAhead;
    for (int64_t r = row0; r < row1; r += kRows) {
        V acc[kRows][kTileTokens];
        const uint8_t* rows[kRows];
        for (int i = 0; i < kRows; i++) {
            rows[i] = w.row(imin(r + i, row1 - 1));
            for (int t = 0; t < n; t++) acc[i][t] = V::zero();
        }
        for (int64_t b = 0; b < blocks; b += 8) {
            const int count = imin(blocks - b, 8);
            uint8_t copy[Format::kBytes];
            for (int i = 0; i < kRows && r + i < row1; i++) {
                prefetch<false>(ahead, count * Format::kBytes / 8);
                ahead += count * Format::kBytes / 8;
                const uint8_t* p = readable<Format>(rows[i] + b / 8 * Format::kBytes, count, w.end(), copy);
                if (count == 8)
                    add_to_tokens<Format, true>(p, 8, inputs + b / 8 * n, n, acc[i], b / 8 % 2);
                else
                    add_to_tokens<Format, false>(p, count, inputs + b / 8 * n, n, acc[i], b / 8 % 2);
            }
        }
        for (int i = 0; i < kRows && r + i < row1; i += 4)
            for (int t = 0; t < n; t++) {
                const V four[4] = {acc[i][t], acc[i + 1][t], acc[i + 2][t], acc[i + 3][t]};
                float dots[4];
                sums(four, dots);
                memcpy(out + t * ld + (r + i - row0), dots, size_t(imin(row1 - r - i, 4)) * sizeof(float));
            }
    }
}

// ---- Panels
//
// Eight rows per vector, one lane each. No lane is empty, but each word of the inputs is needed in all lanes,
// which doubles the loads, the bottleneck of AVX2 processors (decision 011). So panels are for narrow
// matrices whose last eight blocks would be mostly missing; types with super-blocks never are.

constexpr int kLanes = 8;         // rows of a panel
constexpr int kPanelTokens = 16;  // tokens that share one pass over a panel

// Transpose eight vectors of eight 4-byte words.
inline void transpose(__m256i v[8]) {
    __m256i t[8];
    for (int i = 0; i < 8; i += 4) {
        const __m256i ab_lo = _mm256_unpacklo_epi32(v[i], v[i + 1]),
                      ab_hi = _mm256_unpackhi_epi32(v[i], v[i + 1]);
        const __m256i cd_lo = _mm256_unpacklo_epi32(v[i + 2], v[i + 3]);
        const __m256i cd_hi = _mm256_unpackhi_epi32(v[i + 2], v[i + 3]);
        t[i] = _mm256_unpacklo_epi64(ab_lo, cd_lo);      // words 0, 4 of four rows
        t[i + 1] = _mm256_unpackhi_epi64(ab_lo, cd_lo);  // words 1, 5
        t[i + 2] = _mm256_unpacklo_epi64(ab_hi, cd_hi);
        t[i + 3] = _mm256_unpackhi_epi64(ab_hi, cd_hi);
    }
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_permute2x128_si256(t[i], t[i + 4], 0x20);
        v[i + 4] = _mm256_permute2x128_si256(t[i], t[i + 4], 0x31);
    }
}

// Eight rows, one per lane. Per 32-block: eight vectors of codes (four bytes per row), then the scales.
struct Panel {
    __m256i* codes;  // [blocks][8]
    __m256* scale;   // [blocks]
    __m256* min;     // [blocks]
};

template <class Format, int g>
inline void pack_pair(const uint8_t* const rows[8], int n, __m256i* codes) {
    __m256i first[8], second[8];
    for (int r = 0; r < 8; r++) Format::template unpack<g, 8>(rows[r], first[r], second[r]);
    transpose(first);
    transpose(second);
    for (int j = 0; j < 2 && g + 4 * j < n; j++)
        for (int i = 0; i < 4; i++) {
            codes[(g + 4 * j) * 8 + i] = first[4 * j + i];
            codes[(g + 4 * j) * 8 + 4 + i] = second[4 * j + i];
        }
}

template <class Format>
inline void pack_panel(const Matrix& w, int64_t row, int n_rows, int64_t blocks, const Panel& panel) {
    constexpr bool kMin = has_min(Format::kType);
    constexpr int kBytes = Format::kBytes;
    for (int64_t b = 0; b < blocks; b += 8) {
        const int n = imin(blocks - b, 8);
        uint8_t copies[8][kBytes];
        const uint8_t* rows[8];
        Scales scales[8];
        for (int r = 0; r < 8; r++) {  // a short panel repeats its last row
            rows[r] = w.row(row + imin(r, n_rows - 1)) + b / 8 * kBytes;
            rows[r] = readable<Format>(rows[r], n, w.end(), copies[r]);
            scales[r] = Format::template scales<8>(rows[r]);
        }
        pack_pair<Format, 0>(rows, n, panel.codes + b * 8);
        pack_pair<Format, 1>(rows, n, panel.codes + b * 8);
        pack_pair<Format, 2>(rows, n, panel.codes + b * 8);
        pack_pair<Format, 3>(rows, n, panel.codes + b * 8);
        __m256i lanes[8];
        for (int r = 0; r < 8; r++) lanes[r] = _mm256_castps_si256(scales[r].scale);
        transpose(lanes);
        for (int i = 0; i < n; i++) panel.scale[b + i] = _mm256_castsi256_ps(lanes[i]);
        if constexpr (kMin) {
            for (int r = 0; r < 8; r++) lanes[r] = _mm256_castps_si256(scales[r].min);
            transpose(lanes);
            for (int i = 0; i < n; i++) panel.min[b + i] = _mm256_castsi256_ps(lanes[i]);
        }
    }
}

inline __m256i broadcast_word(const int8_t* p) {
    int32_t word;
    memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
}

// The inputs of a tile's tokens.
struct TileInputs {
    const int8_t* q;      // [tokens][32 * stride]
    const float* scale;   // [tokens][stride]
    const int32_t* sums;  // [tokens][stride], see BlockInputs::sums
    int64_t stride;
};

template <class Format>
inline void panel_tile(const Panel& panel, int64_t blocks, const TileInputs& x, int n,
                       float (*acc)[kPanelTokens][kLanes]) {
    constexpr bool kMin = has_min(Format::kType);
    for (int64_t b = 0; b < blocks; b++) {
        Blocks rows;
        for (int i = 0; i < 8; i++) {
            rows.codes[i] = panel.codes[b * 8 + i];
            if constexpr (Format::kSigned) rows.magnitudes[i] = _mm256_abs_epi8(rows.codes[i]);
        }
        rows.scale = panel.scale[b];
        if constexpr (kMin) rows.min = panel.min[b];
        const int8_t *first = x.q + half_at(kInterleaved, b, 0), *second = x.q + half_at(kInterleaved, b, 1);
        for (int t = 0; t < n; t++) {
            const int64_t at = t * x.stride + b;
            BlockInputs token;
            for (int i = 0; i < 8; i++)
                token.words[i] = broadcast_word((i < 4 ? first : second) + t * x.stride * 32 + 4 * (i % 4));
            token.scale = _mm256_set1_ps(x.scale[at]);
            token.sums = _mm256_set1_epi32(x.sums[at]);
            float* lane = acc[b % 16][t];
            _mm256_store_ps(lane, add_products<Format>(rows, token, _mm256_load_ps(lane)));
        }
    }
}

template <class Format>
void panels(const Matrix& w, int64_t row0, int64_t row1, const Inputs& x, int t0, int t1, float* out,
            int64_t ld, uint8_t* scratch) {
    constexpr int kPanels = kPanelRows / kLanes;
    const int64_t blocks = x.k / 32, stride = padded(x.k) / 32;
    auto take = [&](int64_t vectors) {
        uint8_t* p = scratch;
        scratch += vectors * 32;
        return p;
    };
    Panel panel[kPanels];
    for (Panel& p : panel) {
        p.codes = reinterpret_cast<__m256i*>(take(blocks * 8));
        p.scale = reinterpret_cast<__m256*>(take(blocks));
        p.min = reinterpret_cast<__m256*>(take(blocks));
    }
    int32_t* sums = reinterpret_cast<int32_t*>(take(kPanelTokens * stride / 8));
    for (int64_t r = row0; r < row1; r += kPanelRows) {
        const int n_panels = (imin(row1 - r, kPanelRows) + kLanes - 1) / kLanes;
        for (int i = 0; i < n_panels; i++)
            pack_panel<Format>(w, r + kLanes * i, imin(row1 - r - kLanes * i, kLanes), blocks, panel[i]);
        for (int t = t0; t < t1; t += kPanelTokens) {
            const int n = imin(t1 - t, kPanelTokens);
            for (int j = 0; j < n; j++)
                for (int64_t b = 0; b < blocks; b++) sums[j * stride + b] = block_sums<Format>(x, t + j, b);
            const TileInputs tile = {x.q + t * stride * 32, x.scale + t * stride, sums, stride};
            for (int i = 0; i < n_panels; i++) {
                alignas(32) float acc[16][kPanelTokens][kLanes] = {};
                panel_tile<Format>(panel[i], blocks, tile, n, acc);
                const int64_t row = r + kLanes * i;
                const __m256i mask = V::below(imin(row1 - row, kLanes));
                for (int j = 0; j < n; j++) {
                    __m256 lane[16];
                    for (int l = 0; l < 16; l++) lane[l] = _mm256_load_ps(acc[l][j]);
                    for (int half = 8; half; half /= 2)
                        for (int l = 0; l < half; l++) lane[l] = _mm256_add_ps(lane[l], lane[l + half]);
                    _mm256_maskstore_ps(out + (t + j - t0) * ld + (row - row0), mask, lane[0]);
                }
            }
        }
    }
}

// Bytes of weights that stay in the second-level cache between two tiles of tokens.
constexpr int64_t kCachedBytes = 128 * 1024;

template <class Format>
void linear(const Matrix& w, int64_t row0, int64_t row1, const Inputs& x, int t0, int t1, float* out,
            int64_t ld, uint8_t* scratch) {
#ifdef HOTSET_AVX_VNNI
    if (t1 - t0 == 1)
        return avx2_kernels()->linear[int(Format::kType)](w, row0, row1, x, t0, t1, out, ld, scratch);
#else
    if (t1 - t0 == 1) return few_tokens<Format, true, 1>(w, row0, row1, x, t0, out, ld);
    if constexpr (kTakesTwo<Format>)
        if (t1 - t0 == 2 && x.k / 32 % kFewStep<2> == 0)
            return few_tokens<Format, true, 2>(w, row0, row1, x, t0, out, ld);
#endif
    if constexpr (type_facts(Format::kType).block_size < 256) {
        const int64_t blocks = x.k / 32, lanes = (blocks + 7) / 8 * 8;
        if (t1 - t0 > kFewTokens && 4 * lanes > 5 * blocks)  // the bits are the same either way
            return panels<Format>(w, row0, row1, x, t0, t1, out, ld, scratch);
    }
    const int64_t rows = std::max<int64_t>(kCachedBytes / int64_t(w.row_bytes), kPanelRows);
    for (int64_t r = row0; r < row1; r += rows)
        for (int t = t0; t < t1; t += kTileTokens)
            several<Format>(w, r, imin(r + rows, row1), x, t, imin(t1 - t, kTileTokens),
                            out + (t - t0) * ld + (r - row0), ld, scratch);
}

// ---- Float weights, many tokens

// WholeTile with half the lanes at a time: twelve accumulators, three inputs and a weight fill the sixteen
// registers. Whole lanes would spill.
struct HalvedTile {
    static constexpr int kTokens = 3;
    static constexpr int kDecodeFrom = 3;

    template <int T>
    static void add(const float* rows, int64_t stride, const float* x, int64_t k, int64_t count, bool first,
                    V (*acc)[kTokens]) {
        half<T, &V::lo>(rows, stride, x, k, count, first, acc);
        half<T, &V::hi>(rows + 8, stride, x + 8, k, count, first, acc);
    }

    template <int T, __m256 V::* kHalf>
    static HOTSET_INLINE void half(const float* rows, int64_t stride, const float* x, int64_t k,
                                   int64_t count, bool first, V (*acc)[kTokens]) {
        __m256 total[4][T];
        for (int r = 0; r < 4; r++)
            for (int t = 0; t < T; t++) total[r][t] = first ? _mm256_setzero_ps() : acc[r][t].*kHalf;
        for (int64_t i = 0; i < count; i += 16) {
            __m256 inputs[T];
            for (int t = 0; t < T; t++) inputs[t] = _mm256_loadu_ps(x + t * k + i);
            for (int r = 0; r < 4; r++) {
                const __m256 weights = _mm256_loadu_ps(rows + r * stride + i);
                for (int t = 0; t < T; t++) total[r][t] = _mm256_fmadd_ps(weights, inputs[t], total[r][t]);
            }
        }
        for (int r = 0; r < 4; r++)
            for (int t = 0; t < T; t++) acc[r][t].*kHalf = total[r][t];
    }
};

// Decode the scales of n blocks of kStride bytes that begin with an f16 scale.
template <int kStride>
inline void block_scales(const uint8_t* p, int n, const uint8_t*, float* out) {
    for (int i = 0; i < n; i++) out[i] = _cvtsh_ss(load_u16(p + i * kStride));
}

#include "sparse_kernels.h"
#include "channels_avx2.h"
#include "channel_kernels.h"
#include "format_table.h"
#include "encode_kernels.h"
#include "codebook_encoders.h"
}

namespace hotset {

#ifdef HOTSET_AVX_VNNI
const Kernels* avx_vnni_kernels() {
    static const Kernels table = [] {
        using namespace avx_vnni;
        Kernels t = *avx2_kernels();
        t.isa = "avxvnni";
        for_formats([&t]<class Format>() {
            if constexpr (!Format::kSigned && !has_sub_blocks(Format::kType))
                t.linear[int(Format::kType)] = linear<Format>;
        });
        return t;
    }();
    return &table;
}
#else
const Kernels* avx2_kernels() {
    static const Kernels table = [] {
        using namespace avx2;
        Kernels t = float_kernel_table("avx2");
        t.linear[int(Type::F32)] = float_linear<F32Weights, HalvedTile>;
        t.linear[int(Type::F16)] = float_linear<F16Weights, HalvedTile>;
        t.linear[int(Type::BF16)] = float_linear<BF16Weights, HalvedTile>;
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
