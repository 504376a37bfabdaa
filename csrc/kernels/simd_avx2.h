// Sixteen float lanes in two registers. simd_scalar.h defines each function. Included inside the namespace of
// an instruction set.

constexpr int kInterleaved = 8;  // blocks whose halves are interleaved in Inputs::q

struct V {
    __m256 lo, hi;

    static constexpr int kRegisters = 2;
    HOTSET_INLINE static void fetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
    // For data that is read once: does not evict keys and values, other inputs, and Python from the second-
    // and third-level caches.
    HOTSET_INLINE static void fetch_once(const void* p) {
        _mm_prefetch(static_cast<const char*>(p), _MM_HINT_NTA);
    }
    static V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static V set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static V load_n(const float* p, int n) {
        if (n == 16) return load(p);
        return {_mm256_maskload_ps(p, below(n)), _mm256_maskload_ps(p + 8, below(n - 8))};
    }
    static V load_f16(const uint16_t* p) {
        return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8))};
    }
    static V load_bf16(const uint16_t* p) { return {widen_bf16(load128(p)), widen_bf16(load128(p + 8))}; }
    static V load_i8(const int8_t* p) { return widen_i8(load128(p)); }
    static void load_q4(const uint8_t* p, float scale, V& lo, V& hi) {
        const __m128i b = load128(p), nibble = _mm_set1_epi8(15);
        const __m128i values = _mm_setr_epi8(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        const __m256 by = _mm256_set1_ps(scale);
        const V a = widen_i8(_mm_shuffle_epi8(values, _mm_and_si128(b, nibble)));
        const V z = widen_i8(_mm_shuffle_epi8(values, _mm_and_si128(_mm_srli_epi16(b, 4), nibble)));
        lo = {_mm256_mul_ps(by, a.lo), _mm256_mul_ps(by, a.hi)};
        hi = {_mm256_mul_ps(by, z.lo), _mm256_mul_ps(by, z.hi)};
    }
    static V load_nibbles(const uint8_t* p, int shift) {
        const __m128i values = _mm_setr_epi8(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        const __m128i codes = _mm_and_si128(_mm_srli_epi16(load128(p), shift), _mm_set1_epi8(15));
        return widen_i8(_mm_shuffle_epi8(values, codes));
    }
    void store(float* p) const {
        _mm256_storeu_ps(p, lo);
        _mm256_storeu_ps(p + 8, hi);
    }
    void store_n(float* p, int n) const {
        if (n == 16) return store(p);
        _mm256_maskstore_ps(p, below(n), lo);
        _mm256_maskstore_ps(p + 8, below(n - 8), hi);
    }
    void store_f16(uint16_t* p) const {
        constexpr int kRounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(lo, kRounding));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(hi, kRounding));
    }
    void store_i8(int8_t* p) const {
        const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(lo), _mm256_cvtps_epi32(hi));
        const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);  // packs works within 128-bit lanes
        _mm_storeu_si128(
            reinterpret_cast<__m128i*>(p),
            _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
    }

    // All ones in the lanes below n of eight.
    static __m256i below(int n) {
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }
    static __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
    static V widen_i8(__m128i b) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(b, 8)))};
    }
    static __m256 widen_bf16(__m128i h) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
    }
};

inline V operator+(V a, V b) {
    return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline V operator-(V a, V b) {
    return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline V operator*(V a, V b) {
    return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline V operator/(V a, V b) {
    return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
inline V fma(V a, V b, V c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline V max(V a, V b) {
    return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline V min(V a, V b) {
    return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline V abs(V a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline V round(V a) {
    constexpr int kRounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, kRounding), _mm256_round_ps(a.hi, kRounding)};
}
inline V at_least(V x, V bound, V a, V b) {
    return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(x.lo, bound.lo, _CMP_GE_OQ)),
            _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(x.hi, bound.hi, _CMP_GE_OQ))};
}
inline __m256 pow2(__m256 n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline V pow2(V n) {
    return {pow2(n.lo), pow2(n.hi)};
}
inline __m256 blend_range(int first, int last, __m256 a, __m256 b) {
    const __m256i inside = _mm256_andnot_si256(V::below(first), V::below(last));
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(inside));
}
inline V blend_range(int first, int last, V a, V b) {
    return {blend_range(first, last, a.lo, b.lo), blend_range(first - 8, last - 8, a.hi, b.hi)};
}

inline uint32_t nonzero_lanes(V a) {
    const __m256 zero = _mm256_setzero_ps();
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, zero, _CMP_NEQ_UQ))) |
           uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, zero, _CMP_NEQ_UQ))) << 8;
}
inline uint32_t not_below_lanes(V a, V bound) {
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, bound.lo, _CMP_NLT_UQ))) |
           uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, bound.hi, _CMP_NLT_UQ))) << 8;
}

inline float sum(V a) {
    const __m256 h = _mm256_add_ps(a.lo, a.hi);
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
// sum() of four vectors.
inline void sums(const V v[4], float out[4]) {
    auto four_apart = [&](int i) {
        const __m256 a = _mm256_add_ps(v[i].lo, v[i].hi), b = _mm256_add_ps(v[i + 1].lo, v[i + 1].hi);
        return _mm256_castps_pd(
            _mm256_add_ps(_mm256_blend_ps(a, b, 0xf0), _mm256_permute2f128_ps(a, b, 0x21)));
    };
    const __m256d ab = four_apart(0), cd = four_apart(2);
    const __m256 two_apart =
        _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)),
                      _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));  // a a c c | b b d d
    const __m256 all = _mm256_add_ps(two_apart, _mm256_movehdup_ps(two_apart));
    const __m256i order = _mm256_setr_epi32(0, 4, 2, 6, 0, 0, 0, 0);
    _mm_storeu_ps(out, _mm256_castps256_ps128(_mm256_permutevar8x32_ps(all, order)));
}

inline float max_lane(V a) {
    const __m256 h = _mm256_max_ps(a.lo, a.hi);
    const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}

// Reduce the lanes of four vectors with op: two apart, then neighbours, then four apart.
template <class Op>
HOTSET_INLINE __m128 across(__m256 a, __m256 b, __m256 c, __m256 d, Op op) {
    auto halves = [op](__m256 v, __m256 w) {
        const __m256d x = _mm256_castps_pd(v), y = _mm256_castps_pd(w);
        return op(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
    };
    const __m256 ab = halves(a, b), cd = halves(c, d);
    const __m256 all = op(_mm256_shuffle_ps(ab, cd, 0x88), _mm256_shuffle_ps(ab, cd, 0xdd));
    return _mm256_castps256_ps128(op(all, _mm256_permute2f128_ps(all, all, 1)));
}
inline void max_lanes(const V v[4], float out[4]) {
    auto op = [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); };
    auto halves = [&](int i) { return op(v[i].lo, v[i].hi); };
    _mm_storeu_ps(out, across(halves(0), halves(1), halves(2), halves(3), op));
}
inline void integer_sums(const V v[4], float out[4]) {
    auto op = [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); };
    auto halves = [&](int i) { return op(v[i].lo, v[i].hi); };
    _mm_storeu_ps(out, across(halves(0), halves(1), halves(2), halves(3), op));
}
