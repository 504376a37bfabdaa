// Integer parts of channel_kernels.h. Four channels' codes are interleaved, so that a maddubs and a madd add
// four terms. A code of eight bits is taken as two of four, lest the int16 in between saturate.
// Included inside the namespace of an instruction set.

inline V load_i32(const int32_t* p) {
    auto at = [](const int32_t* q) {
        return _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)));
    };
    return {at(p), at(p + 8)};
}

// Of four rows a, b, c, d the bytes (a[i] b[i] c[i] d[i]), i = 4 v .. 4 v + 3 of each 16 bytes in out[v].
inline void interleave(const __m256i* row, __m256i* out) {
    const __m256i ab0 = _mm256_unpacklo_epi8(row[0], row[1]), ab1 = _mm256_unpackhi_epi8(row[0], row[1]);
    const __m256i cd0 = _mm256_unpacklo_epi8(row[2], row[3]), cd1 = _mm256_unpackhi_epi8(row[2], row[3]);
    out[0] = _mm256_unpacklo_epi16(ab0, cd0);
    out[1] = _mm256_unpackhi_epi16(ab0, cd0);
    out[2] = _mm256_unpacklo_epi16(ab1, cd1);
    out[3] = _mm256_unpackhi_epi16(ab1, cd1);
}

// sums + the four products of nibbles with the bytes of q.
inline __m256i add_nibbles(__m256i sums, __m256i nibbles, __m256i q) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(nibbles, q), _mm256_set1_epi16(1)));
}

// sums[v] holds 4 v .. 4 v + 3 of each of two groups of 16; they go to `out` and `out + stride`.
inline void store_groups(const int32_t* sums, int32_t* out, int stride) {
    __m256i of[4];
    for (int v = 0; v < 4; v++) of[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums) + v);
    auto at = [](int32_t* p) { return reinterpret_cast<__m256i*>(p); };
    _mm256_storeu_si256(at(out), _mm256_permute2x128_si256(of[0], of[1], 0x20));
    _mm256_storeu_si256(at(out + 8), _mm256_permute2x128_si256(of[2], of[3], 0x20));
    _mm256_storeu_si256(at(out + stride), _mm256_permute2x128_si256(of[0], of[1], 0x31));
    _mm256_storeu_si256(at(out + stride + 8), _mm256_permute2x128_si256(of[2], of[3], 0x31));
}

// 32 bytes of a row, or its last 16.
inline __m256i row_bytes(const uint8_t* p, bool whole) {
    if (whole) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

template <bool kFour, bool kFetch>
inline void add_quad(const ChannelQuad& here, const ChannelQuad& ahead, uint32_t quad, int n_cols, bool first,
                     int32_t start, int32_t* sums) {
    constexpr int kColumns = kFour ? 64 : 32;  // of 32 bytes
    const __m256i nibble = _mm256_set1_epi8(15), q = _mm256_set1_epi32(int32_t(quad));
    for (int c = 0; c < n_cols; c += kColumns) {
        const int at = c * 32 / kColumns;
        __m256i row[4], codes[4];
        for (int i = 0; i < 4; i++) {
            row[i] = row_bytes(here.row[i] + at, n_cols - c >= kColumns);
            if (kFetch && at % 64 == 0) V::fetch(ahead.row[i] + at);
        }
        interleave(row, codes);
        __m256i* to = reinterpret_cast<__m256i*>(sums + c);
        auto before = [&](int v) { return first ? _mm256_set1_epi32(start) : _mm256_loadu_si256(to + v); };
        for (int v = 0; v < 4; v++) {
            if constexpr (!kFour) codes[v] = _mm256_xor_si256(codes[v], _mm256_set1_epi8(-128));
            const __m256i low = _mm256_and_si256(codes[v], nibble);
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(codes[v], 4), nibble);
            if constexpr (kFour) {
                _mm256_storeu_si256(to + v, add_nibbles(before(v), low, q));
                _mm256_storeu_si256(to + 4 + v, add_nibbles(before(4 + v), high, q));
            } else {
                const __m256i of_high = add_nibbles(_mm256_setzero_si256(), high, q);
                _mm256_storeu_si256(
                    to + v, _mm256_add_epi32(add_nibbles(before(v), low, q), _mm256_slli_epi32(of_high, 4)));
            }
        }
    }
}

template <bool kFour>
inline void order_sums(const int32_t* sums, int32_t* dots) {
    for (int c = 0; c < kChannelColumns; c += kFour ? 64 : 32) {
        store_groups(sums + c, dots + c, kFour ? 32 : 16);
        if (kFour) store_groups(sums + c + 32, dots + c + 16, 32);
    }
}
