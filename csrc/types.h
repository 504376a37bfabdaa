// Tensor types of GGUF: ids, block sizes, and the view of a matrix in a mapped file.
//
// Functions in this header and in kernels.h are static, and members are HOTSET_INLINE. The linker keeps one
// copy of an inline function that several files compile. That copy could contain AVX-512 and then run on a
// processor without it.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef _MSC_VER
#define HOTSET_INLINE __forceinline
#else
#define HOTSET_INLINE inline __attribute__((always_inline))
#endif

namespace hotset {

// GGUF's types of blocks: name, id, weights per block, bytes per block. Every instruction set has the kernels
// of each (kernels/format_table.h); kernels/blocks.h defines their values.
#define HOTSET_BLOCK_TYPES(TYPE) \
    TYPE(Q4_0, 2, 32, 18)        \
    TYPE(Q4_1, 3, 32, 20)        \
    TYPE(Q5_0, 6, 32, 22)        \
    TYPE(Q5_1, 7, 32, 24)        \
    TYPE(Q8_0, 8, 32, 34)        \
    TYPE(Q2_K, 10, 256, 84)      \
    TYPE(Q3_K, 11, 256, 110)     \
    TYPE(Q4_K, 12, 256, 144)     \
    TYPE(Q5_K, 13, 256, 176)     \
    TYPE(Q6_K, 14, 256, 210)     \
    TYPE(IQ2_XXS, 16, 256, 66)   \
    TYPE(IQ2_XS, 17, 256, 74)    \
    TYPE(IQ3_XXS, 18, 256, 98)   \
    TYPE(IQ1_S, 19, 256, 50)     \
    TYPE(IQ4_NL, 20, 32, 18)     \
    TYPE(IQ3_S, 21, 256, 110)    \
    TYPE(IQ2_S, 22, 256, 82)     \
    TYPE(IQ4_XS, 23, 256, 136)   \
    TYPE(IQ1_M, 29, 256, 56)     \
    TYPE(TQ1_0, 34, 256, 54)     \
    TYPE(TQ2_0, 35, 256, 66)     \
    TYPE(MXFP4, 39, 32, 17)      \
    TYPE(Q1_0, 41, 128, 18)

enum class Type : int {
    F32 = 0,
    F16 = 1,
    BF16 = 30,
    // Not GGUF types: codes by row, and one scale per column for each 32 rows (see Matrix::scales).
    Planes4 = 31,  // 16 bytes per 32 columns, codes as in a Q4_0 block
    Planes8 = 32,  // one byte per column
#define HOTSET_TYPE(name, id, block_size, block_bytes) name = (id),
    HOTSET_BLOCK_TYPES(HOTSET_TYPE)
#undef HOTSET_TYPE
};

constexpr int kTypeCount = 43;  // more than any id
constexpr int kPlaneRows = 32;  // rows that share one row of scales

struct TypeFacts {
    const char* name;
    int block_size;   // weights per block
    int block_bytes;  // bytes per block; 0: unsupported type
};

static constexpr TypeFacts type_facts(Type type) {
    switch (type) {
        case Type::F32:
            return {"F32", 1, 4};
        case Type::F16:
            return {"F16", 1, 2};
        case Type::BF16:
            return {"BF16", 1, 2};
#define HOTSET_TYPE(name, id, block_size, block_bytes) \
    case Type::name:                                   \
        return {#name, block_size, block_bytes};
            HOTSET_BLOCK_TYPES(HOTSET_TYPE)
#undef HOTSET_TYPE
        case Type::Planes4:
            return {"planes of 4 bits", 32, 16};
        case Type::Planes8:
            return {"planes of 8 bits", 32, 32};
    }
    return {"?", 1, 0};
}

static constexpr bool is_float(Type type) {
    return type == Type::F32 || type == Type::F16 || type == Type::BF16;
}

static constexpr bool is_planes(Type type) {
    return type == Type::Planes4 || type == Type::Planes8;
}

// A weight matrix in the mapped file: `rows` rows of `cols` weights each. The rows of a store (store/store.h)
// are at separate addresses, so such a matrix needs a kernel that asks for one row at a time.
struct Matrix {
    Type type = Type::F32;
    const uint8_t* data = nullptr;
    int64_t rows = 0;
    int64_t cols = 0;
    size_t row_bytes = 0;
    const uint16_t* scales = nullptr;        // planes only: f16 [ceil(rows / kPlaneRows)][cols]
    const uint8_t* const* places = nullptr;  // store only: the address of each row; `data` is the end

    HOTSET_INLINE const uint8_t* row(int64_t r) const { return places ? places[r] : data + r * row_bytes; }
    // The first address that must not be read.
    HOTSET_INLINE const uint8_t* end() const { return places ? data : data + rows * row_bytes; }
};

static inline float f32_from_bits(uint32_t bits) {
    return std::bit_cast<float>(bits);
}

// Convert IEEE half to float exactly, without the compiler's half types.
static inline float f16_to_f32(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16;
    const uint32_t exponent = (h >> 10) & 0x1f;
    uint32_t mantissa = h & 0x3ff;
    if (exponent == 31) return f32_from_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent != 0) return f32_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    const float tiny = float(mantissa) * 0x1p-24f;  // subnormal: exact in float
    return sign ? -tiny : tiny;
}

// Convert float to IEEE half, rounding to nearest even.
static inline uint16_t f32_to_f16(float f) {
    const uint32_t bits = std::bit_cast<uint32_t>(f);
    const uint32_t sign = (bits >> 16) & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));  // NaN
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);                               // overflows
    if (magnitude < 0x38800000) {                                                              // subnormal
        // Adding 0.5 leaves the rounded multiple of 2^-24 in the low bits of the mantissa.
        const float shifted = f32_from_bits(magnitude) + 0.5f;
        return uint16_t(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000));
    }
    const uint32_t odd = (magnitude >> 13) & 1;
    return uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + odd) >> 13));
}

static inline float bf16_to_f32(uint16_t b) {
    return f32_from_bits(uint32_t(b) << 16);
}

// Return 2^(e - 128), half of an MXFP4 block's scale: its code values are stored doubled. The result is
// exact; the two smallest are subnormal.
static inline float half_of_e8m0(uint8_t e) {
    return f32_from_bits(e < 2 ? 0x00200000u << e : uint32_t(e - 1) << 23);
}

static inline uint16_t load_u16(const uint8_t* p) {
    uint16_t v;
    std::memcpy(&v, p, 2);
    return v;
}

static inline uint32_t load_u32(const uint8_t* p) {
    uint32_t v;
    std::memcpy(&v, p, 4);
    return v;
}

static inline float load_f16(const uint8_t* p) {
    return f16_to_f32(load_u16(p));
}

// Decode one row of `cols` weights to float. This is the reference for every format.
void dequantize_row(Type type, const uint8_t* row, int64_t cols, float* out);

}  // namespace hotset
