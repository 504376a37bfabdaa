// Sixteen float lanes in one register. simd_scalar.h defines each function. Included inside the namespace of
// an instruction set.

constexpr int kInterleaved = 4;  // blocks whose halves are interleaved in Inputs::q

struct V {
    __m512 v;

    static constexpr int kRegisters = 1;
    HOTSET_INLINE static void fetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
    // For data that is read once, as in simd_avx2.h.
    HOTSET_INLINE static void fetch_once(const void* p) {
        _mm_prefetch(static_cast<const char*>(p), _MM_HINT_NTA);
    }
    static V zero() { return {_mm512_setzero_ps()}; }
    static V set(float x) { return {_mm512_set1_ps(x)}; }
    static V load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static V load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
    static V load_f16(const uint16_t* p) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    }
    static V load_bf16(const uint16_t* p) {
        const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
    }
    static V load_i8(const int8_t* p) {
        const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b))};
    }
    static void load_q4(const uint8_t* p, float scale, V& lo, V& hi) {
        const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        const __m512 values = _mm512_mul_ps(
            _mm512_set1_ps(scale), _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
        lo = {_mm512_permutexvar_ps(codes, values)};  // uses only the low four bits of an index
        hi = {_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), values)};
    }
    static V load_nibbles(const uint8_t* p, int shift) {
        const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        return {_mm512_permutexvar_ps(_mm512_srl_epi32(codes, _mm_cvtsi32_si128(shift)), values)};
    }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    void store_n(float* p, int n) const { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
    void store_f16(uint16_t* p) const {
        const __m256i h = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), h);
    }
    void store_i8(int8_t* p) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
    }

    static __mmask16 first_lanes(int n) { return __mmask16((1u << n) - 1); }
};

inline V operator+(V a, V b) {
    return {_mm512_add_ps(a.v, b.v)};
}
inline V operator-(V a, V b) {
    return {_mm512_sub_ps(a.v, b.v)};
}
inline V operator*(V a, V b) {
    return {_mm512_mul_ps(a.v, b.v)};
}
inline V operator/(V a, V b) {
    return {_mm512_div_ps(a.v, b.v)};
}
inline V fma(V a, V b, V c) {
    return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
inline V max(V a, V b) {
    return {_mm512_max_ps(a.v, b.v)};
}
inline V min(V a, V b) {
    return {_mm512_min_ps(a.v, b.v)};
}
inline V abs(V a) {
    return {_mm512_abs_ps(a.v)};
}
inline V round(V a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline V at_least(V x, V bound, V a, V b) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, bound.v, _CMP_GE_OQ), b.v, a.v)};
}
inline V pow2(V n) {
    const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
inline V blend_range(int first, int last, V a, V b) {
    const __mmask16 inside = V::first_lanes(last) & __mmask16(~V::first_lanes(first));
    return {_mm512_mask_blend_ps(inside, b.v, a.v)};
}

inline uint32_t nonzero_lanes(V a) {
    return _mm512_cmp_ps_mask(a.v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
}
inline uint32_t not_below_lanes(V a, V bound) {
    return _mm512_cmp_ps_mask(a.v, bound.v, _CMP_NLT_UQ);
}

inline float sum(V a) {
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
// sum() of four vectors.
inline void sums(const V v[4], float out[4]) {
    auto halves = [&](int i) {  // eight apart: a a a a b b b b, in quarters
        const __m512 a = v[i].v, b = v[i + 1].v;
        return _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
    };
    const __m512 ab = halves(0), cd = halves(2);
    const __m512 four_apart =
        _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));  // a b c d
    const __m512 two_apart = _mm512_add_ps(four_apart, _mm512_permute_ps(four_apart, 0x4e));
    const __m512 all = _mm512_add_ps(two_apart, _mm512_movehdup_ps(two_apart));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(order, all)));
}
inline float max_lane(V a) {
    const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}

// Reduce the lanes of four vectors with op: two apart, neighbours, eight apart, then four apart.
template <class Op>
HOTSET_INLINE __m128 across(__m512 a, __m512 b, __m512 c, __m512 d, Op op) {
    auto halves = [op](__m512 v, __m512 w) {
        const __m512d x = _mm512_castps_pd(v), y = _mm512_castps_pd(w);
        return op(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    };
    const __m512 ab = halves(a, b), cd = halves(c, d);
    __m512 all = op(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xdd));
    all = op(all, _mm512_shuffle_f32x4(all, all, 0x4e));
    return _mm512_castps512_ps128(op(all, _mm512_shuffle_f32x4(all, all, 0xb1)));
}
inline void max_lanes(const V v[4], float out[4]) {
    auto op = [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); };
    _mm_storeu_ps(out, across(v[0].v, v[1].v, v[2].v, v[3].v, op));
}
inline void integer_sums(const V v[4], float out[4]) {
    auto op = [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); };
    _mm_storeu_ps(out, across(v[0].v, v[1].v, v[2].v, v[3].v, op));
}
