// Integer parts of channel_kernels.h. Four channels' codes are interleaved, so that a dpbusd adds four terms.
// Included inside the namespace of an instruction set.

inline V load_i32(const int32_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))};
}

// Of four rows a, b, c, d the bytes (a[i] b[i] c[i] d[i]), i = 4 v .. 4 v + 3 of each 16 bytes in out[v].
inline void interleave(const __m512i* row, __m512i* out) {
    const __m512i ab0 = _mm512_unpacklo_epi8(row[0], row[1]), ab1 = _mm512_unpackhi_epi8(row[0], row[1]);
    const __m512i cd0 = _mm512_unpacklo_epi8(row[2], row[3]), cd1 = _mm512_unpackhi_epi8(row[2], row[3]);
    out[0] = _mm512_unpacklo_epi16(ab0, cd0);
    out[1] = _mm512_unpackhi_epi16(ab0, cd0);
    out[2] = _mm512_unpacklo_epi16(ab1, cd1);
    out[3] = _mm512_unpackhi_epi16(ab1, cd1);
}

// sums[v] holds 4 v .. 4 v + 3 of each of four groups of 16 → sums[g] holds group g.
inline void transpose_groups(__m512i* sums) {
    const __m512i a = _mm512_shuffle_i32x4(sums[0], sums[1], 0x44),
                  b = _mm512_shuffle_i32x4(sums[2], sums[3], 0x44);
    const __m512i c = _mm512_shuffle_i32x4(sums[0], sums[1], 0xee),
                  d = _mm512_shuffle_i32x4(sums[2], sums[3], 0xee);
    sums[0] = _mm512_shuffle_i32x4(a, b, 0x88);
    sums[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
    sums[2] = _mm512_shuffle_i32x4(c, d, 0x88);
    sums[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
}

template <bool kFour, bool kFetch>
inline void add_quad(const ChannelQuad& here, const ChannelQuad& ahead, uint32_t quad, int n_cols, bool first,
                     int32_t start, int32_t* sums) {
    constexpr int kColumns = kFour ? 128 : 64;  // of 64 bytes
    const __m512i nibble = _mm512_set1_epi8(15), q = _mm512_set1_epi32(int32_t(quad));
    for (int c = 0; c < n_cols; c += kColumns) {
        const int at = c * 64 / kColumns, left = imin(kColumns, n_cols - c) * 64 / kColumns;
        const __mmask64 some = ~uint64_t(0) >> (64 - left);
        __m512i row[4], codes[4];
        for (int i = 0; i < 4; i++) {
            row[i] = _mm512_maskz_loadu_epi8(some, here.row[i] + at);
            if (kFetch) V::fetch(ahead.row[i] + at);
        }
        interleave(row, codes);
        auto add = [&](int32_t* to, __m512i of) {
            const __m512i before = first ? _mm512_set1_epi32(start) : _mm512_loadu_si512(to);
            _mm512_storeu_si512(to, _mm512_dpbusd_epi32(before, of, q));
        };
        for (int v = 0; v < 4; v++) {
            if constexpr (kFour) {
                add(sums + c + 16 * v, _mm512_and_si512(codes[v], nibble));
                add(sums + c + 64 + 16 * v, _mm512_and_si512(_mm512_srli_epi16(codes[v], 4), nibble));
            } else {
                add(sums + c + 16 * v, _mm512_xor_si512(codes[v], _mm512_set1_epi8(-128)));
            }
        }
    }
}

template <bool kFour>
inline void order_sums(const int32_t* sums, int32_t* dots) {
    for (int half = 0; half < 2; half++) {
        __m512i of[4];
        for (int v = 0; v < 4; v++) of[v] = _mm512_loadu_si512(sums + 64 * half + 16 * v);
        transpose_groups(of);
        for (int g = 0; g < 4; g++)
            _mm512_storeu_si512(dots + (kFour ? 32 * g + 16 * half : 64 * half + 16 * g), of[g]);
    }
}
