// Sixteen float lanes in four registers. simd_scalar.h defines each function. Included inside the namespace
// of an instruction set.
//
// fmax, fmin and pairwise forms are not used: NaN and signed zeros differ from a > b ? a : b.

constexpr int kInterleaved = 4;  // blocks whose halves are interleaved in Inputs::q

struct V {
    float32x4_t v[4];

    // Call f(i) for each of the four registers.
    template <class F>
    static V each(F f) {
        return {{f(0), f(1), f(2), f(3)}};
    }

    static constexpr int kRegisters = 4;
    HOTSET_INLINE static void fetch(const void* p) { __builtin_prefetch(p); }
    static V zero() { return set(0.0f); }
    static V set(float x) {
        const float32x4_t r = vdupq_n_f32(x);
        return {{r, r, r, r}};
    }
    static V load(const float* p) {
        return each([p](int i) { return vld1q_f32(p + 4 * i); });
    }
    static V load_n(const float* p, int n) {
        if (n == 16) return load(p);
        float lanes[16] = {};
        memcpy(lanes, p, size_t(n) * sizeof(float));
        return load(lanes);
    }
    static V load_f16(const uint16_t* p) {
        return each([p](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
    }
    static V load_bf16(const uint16_t* p) {
        return each([p](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
    }
    static V load_i8(const int8_t* p) { return widen_i8(vld1q_s8(p)); }
    static void load_q4(const uint8_t* p, float scale, V& lo, V& hi) {
        const uint8x16_t b = vld1q_u8(p);
        const int8x16_t eight = vdupq_n_s8(8);
        const V a = widen_i8(vsubq_s8(vreinterpretq_s8_u8(vandq_u8(b, vdupq_n_u8(15))), eight));
        const V z = widen_i8(vsubq_s8(vreinterpretq_s8_u8(vshrq_n_u8(b, 4)), eight));
        lo = each([&](int i) { return vmulq_n_f32(a.v[i], scale); });
        hi = each([&](int i) { return vmulq_n_f32(z.v[i], scale); });
    }
    static V load_nibbles(const uint8_t* p, int shift) {
        const uint8x16_t codes = vandq_u8(vshlq_u8(vld1q_u8(p), vdupq_n_s8(int8_t(-shift))), vdupq_n_u8(15));
        return widen_i8(vsubq_s8(vreinterpretq_s8_u8(codes), vdupq_n_s8(8)));
    }
    static V widen_i8(int8x16_t b) {
        const int16x8_t lo = vmovl_s8(vget_low_s8(b)), hi = vmovl_s8(vget_high_s8(b));
        return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(lo))),
                 vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(hi)))}};
    }
    void store(float* p) const {
        for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, v[i]);
    }
    void store_n(float* p, int n) const {
        if (n == 16) return store(p);
        float lanes[16];
        store(lanes);
        memcpy(p, lanes, size_t(n) * sizeof(float));
    }
    void store_f16(uint16_t* p) const {
        for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(v[i])));
    }
    void store_i8(int8_t* p) const {
        auto pair = [this](int i) {
            return vmovn_s16(
                vcombine_s16(vmovn_s32(vcvtq_s32_f32(v[i])), vmovn_s32(vcvtq_s32_f32(v[i + 1]))));
        };
        vst1q_s8(p, vcombine_s8(pair(0), pair(2)));
    }
};

inline float32x4_t larger(float32x4_t a, float32x4_t b) {
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}
inline float32x4_t smaller(float32x4_t a, float32x4_t b) {
    return vbslq_f32(vcltq_f32(a, b), a, b);
}

inline V operator+(V a, V b) {
    return V::each([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline V operator-(V a, V b) {
    return V::each([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline V operator*(V a, V b) {
    return V::each([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline V operator/(V a, V b) {
    return V::each([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline V fma(V a, V b, V c) {
    return V::each([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
inline V max(V a, V b) {
    return V::each([&](int i) { return larger(a.v[i], b.v[i]); });
}
inline V min(V a, V b) {
    return V::each([&](int i) { return smaller(a.v[i], b.v[i]); });
}
inline V abs(V a) {
    return V::each([&](int i) { return vabsq_f32(a.v[i]); });
}
inline V round(V a) {
    return V::each([&](int i) { return vrndnq_f32(a.v[i]); });
}
inline V at_least(V x, V bound, V a, V b) {
    return V::each([&](int i) { return vbslq_f32(vcgeq_f32(x.v[i], bound.v[i]), a.v[i], b.v[i]); });
}
inline V pow2(V n) {
    return V::each([&](int i) {
        return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23));
    });
}
inline V blend_range(int first, int last, V a, V b) {
    alignas(16) static constexpr int32_t kLanes[4] = {0, 1, 2, 3};
    return V::each([&](int i) {
        const int32x4_t lane = vaddq_s32(vld1q_s32(kLanes), vdupq_n_s32(4 * i));
        const uint32x4_t inside =
            vandq_u32(vcgeq_s32(lane, vdupq_n_s32(first)), vcltq_s32(lane, vdupq_n_s32(last)));
        return vbslq_f32(inside, a.v[i], b.v[i]);
    });
}

inline uint32_t lane_bits(const uint32x4_t lanes[4]) {
    uint32_t bits = 0;
    for (int i = 0; i < 4; i++) bits |= vaddvq_u32(vandq_u32(lanes[i], uint32x4_t{1, 2, 4, 8})) << (4 * i);
    return bits;
}
inline uint32_t nonzero_lanes(V a) {
    uint32x4_t lanes[4];
    for (int i = 0; i < 4; i++) lanes[i] = vmvnq_u32(vceqzq_f32(a.v[i]));
    return lane_bits(lanes);
}
inline uint32_t not_below_lanes(V a, V bound) {
    uint32x4_t lanes[4];
    for (int i = 0; i < 4; i++) lanes[i] = vmvnq_u32(vcltq_f32(a.v[i], bound.v[i]));
    return lane_bits(lanes);
}

inline float sum(V a) {
    const float32x4_t q = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    const float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
    return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}
// sum() of four vectors.
inline void sums(const V v[4], float out[4]) {
    for (int i = 0; i < 4; i++) out[i] = sum(v[i]);
}
inline float max_lane(V a) {
    const float32x4_t q = larger(larger(a.v[0], a.v[2]), larger(a.v[1], a.v[3]));
    const float32x4_t d = larger(q, vextq_f32(q, q, 2));
    return vgetq_lane_f32(larger(d, vextq_f32(d, d, 1)), 0);
}

// Reduce the lanes of four vectors with op.
template <class Op>
HOTSET_INLINE float32x4_t across(const V v[4], Op op) {
    auto neighbours = [op](float32x4_t a, float32x4_t b) { return op(vuzp1q_f32(a, b), vuzp2q_f32(a, b)); };
    auto quarters = [op](V a) { return op(op(a.v[0], a.v[2]), op(a.v[1], a.v[3])); };
    return neighbours(neighbours(quarters(v[0]), quarters(v[1])), neighbours(quarters(v[2]), quarters(v[3])));
}
inline void max_lanes(const V v[4], float out[4]) {
    vst1q_f32(out, across(v, [](float32x4_t a, float32x4_t b) { return larger(a, b); }));
}
inline void integer_sums(const V v[4], float out[4]) {
    vst1q_f32(out, across(v, [](float32x4_t a, float32x4_t b) { return vaddq_f32(a, b); }));
}
