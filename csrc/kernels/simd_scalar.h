// Sixteen float lanes in plain code: the readable reference of simd_avx2.h, simd_avx512.h and simd_neon.h.
// Included inside the namespace of an instruction set.

constexpr int kInterleaved = 4;  // blocks whose halves are interleaved in Inputs::q

struct V {
    float v[16];

    static constexpr int kRegisters = 16;
    // Prefetch; any address is allowed. Functions that only call it must be force-inlined: otherwise GCC sees
    // no effect and removes the calls.
    HOTSET_INLINE static void fetch(const void*) {}
    static V zero() { return set(0.0f); }
    static V set(float x) {
        V r;
        for (int i = 0; i < 16; i++) r.v[i] = x;
        return r;
    }
    static V load(const float* p) {
        V r;
        for (int i = 0; i < 16; i++) r.v[i] = p[i];
        return r;
    }
    // Load the first n lanes; the others are zero.
    static V load_n(const float* p, int n) {
        V r = zero();
        for (int i = 0; i < n; i++) r.v[i] = p[i];
        return r;
    }
    static V load_f16(const uint16_t* p) {
        V r;
        for (int i = 0; i < 16; i++) r.v[i] = f16_to_f32(p[i]);
        return r;
    }
    static V load_bf16(const uint16_t* p) {
        V r;
        for (int i = 0; i < 16; i++) r.v[i] = bf16_to_f32(p[i]);
        return r;
    }
    static V load_i8(const int8_t* p) {
        V r;
        for (int i = 0; i < 16; i++) r.v[i] = float(p[i]);
        return r;
    }
    // scale * (code - 8) for the nibbles of 16 bytes: low nibbles in lo, high ones in hi.
    static void load_q4(const uint8_t* p, float scale, V& lo, V& hi) {
        for (int i = 0; i < 16; i++) {
            lo.v[i] = scale * float((p[i] & 15) - 8);
            hi.v[i] = scale * float((p[i] >> 4) - 8);
        }
    }
    // code - 8 for the low (shift 0) or high (shift 4) nibbles of 16 bytes.
    static V load_nibbles(const uint8_t* p, int shift) {
        V r;
        for (int i = 0; i < 16; i++) r.v[i] = float((p[i] >> shift & 15) - 8);
        return r;
    }
    void store(float* p) const {
        for (int i = 0; i < 16; i++) p[i] = v[i];
    }
    void store_n(float* p, int n) const {
        for (int i = 0; i < n; i++) p[i] = v[i];
    }
    void store_f16(uint16_t* p) const {
        for (int i = 0; i < 16; i++) p[i] = f32_to_f16(v[i]);
    }
    // Lanes must hold integers in [-128, 127].
    void store_i8(int8_t* p) const {
        for (int i = 0; i < 16; i++) p[i] = int8_t(v[i]);
    }
};

// Return a bit for each lane that is not zero.
inline uint32_t nonzero_lanes(V a) {
    uint32_t bits = 0;
    for (int i = 0; i < 16; i++) bits |= uint32_t(a.v[i] != 0.0f) << i;
    return bits;
}
// Return a bit for each lane that is not below the bound.
inline uint32_t not_below_lanes(V a, V bound) {
    uint32_t bits = 0;
    for (int i = 0; i < 16; i++) bits |= uint32_t(!(a.v[i] < bound.v[i])) << i;
    return bits;
}

#define HOTSET_LANEWISE(expression)                     \
    V r;                                                \
    for (int i = 0; i < 16; i++) r.v[i] = (expression); \
    return r

inline V operator+(V a, V b) {
    HOTSET_LANEWISE(a.v[i] + b.v[i]);
}
inline V operator-(V a, V b) {
    HOTSET_LANEWISE(a.v[i] - b.v[i]);
}
inline V operator*(V a, V b) {
    HOTSET_LANEWISE(a.v[i] * b.v[i]);
}
inline V operator/(V a, V b) {
    HOTSET_LANEWISE(a.v[i] / b.v[i]);
}
inline V fma(V a, V b, V c) {
    HOTSET_LANEWISE(fmaf(a.v[i], b.v[i], c.v[i]));
}
inline V max(V a, V b) {
    HOTSET_LANEWISE(a.v[i] > b.v[i] ? a.v[i] : b.v[i]);
}
inline V min(V a, V b) {
    HOTSET_LANEWISE(a.v[i] < b.v[i] ? a.v[i] : b.v[i]);
}
inline V abs(V a) {
    HOTSET_LANEWISE(fabsf(a.v[i]));
}
// To nearest, ties to even.
inline V round(V a) {
    HOTSET_LANEWISE(nearbyintf(a.v[i]));
}
// Take a where x >= bound, otherwise b.
inline V at_least(V x, V bound, V a, V b) {
    HOTSET_LANEWISE(x.v[i] >= bound.v[i] ? a.v[i] : b.v[i]);
}
// n in [-127, 128]
inline V pow2(V n) {
    HOTSET_LANEWISE(f32_from_bits(uint32_t(int32_t(n.v[i]) + 127) << 23));
}
// Take lanes [first, last) from a, the others from b.
inline V blend_range(int first, int last, V a, V b) {
    HOTSET_LANEWISE(i >= first && i < last ? a.v[i] : b.v[i]);
}

#undef HOTSET_LANEWISE

inline float sum(V a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a.v[i] = a.v[i] + a.v[i + half];
    return a.v[0];
}
// sum() of four vectors.
inline void sums(const V v[4], float out[4]) {
    for (int i = 0; i < 4; i++) out[i] = sum(v[i]);
}
inline float max_lane(V a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
    return a.v[0];
}
// Reduce four vectors at once: their maxima, if no lane is NaN, and sums of integers in any order. NaN if a
// lane is NaN.
inline void max_lanes(const V v[4], float out[4]) {
    for (int i = 0; i < 4; i++) out[i] = max_lane(v[i]);
}
inline void integer_sums(const V v[4], float out[4]) {
    for (int i = 0; i < 4; i++) out[i] = sum(v[i]);
}
