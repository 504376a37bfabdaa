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

template <bool kFour>
inline void channel_dots(const ChannelBlock& block, const ChannelBlock& ahead, int n_cols, int32_t start,
                         int32_t isum, int32_t* dots) {
    if constexpr (kFour) {
        const __mmask64 some = ~uint64_t(0) >> (64 - n_cols / 2);
        __m512i low[4], high[4];
        for (int v = 0; v < 4; v++) low[v] = high[v] = _mm512_set1_epi32(start);
        for (int j = 0; j < block.n_quads; j++) {
            __m512i row[4], codes[4];
            for (int i = 0; i < 4; i++) row[i] = _mm512_maskz_loadu_epi8(some, block.row(4 * j + i));
            if (j < ahead.n_quads)
                for (int i = 0; i < 4; i++) V::fetch(ahead.row(4 * j + i));
            interleave(row, codes);
            const __m512i q = _mm512_set1_epi32(int32_t(block.quads[j]));
            const __m512i nibble = _mm512_set1_epi8(15);
            for (int v = 0; v < 4; v++) {
                low[v] = _mm512_dpbusd_epi32(low[v], _mm512_and_si512(codes[v], nibble), q);
                high[v] =
                    _mm512_dpbusd_epi32(high[v], _mm512_and_si512(_mm512_srli_epi16(codes[v], 4), nibble), q);
            }
        }
        for (int j = block.n_quads; j < ahead.n_quads; j++)
            for (int i = 0; i < 4; i++) V::fetch(ahead.row(4 * j + i));
        transpose_groups(low);
        transpose_groups(high);
        for (int g = 0; g < 4; g++) {
            _mm512_store_si512(dots + 32 * g, low[g]);
            _mm512_store_si512(dots + 32 * g + 16, high[g]);
        }
    } else {
        for (int c = 0; c < n_cols; c += 64) {
            const __mmask64 some = ~uint64_t(0) >> (n_cols - c < 64 ? 32 : 0);
            __m512i sums[4];  // of codes + 128, which are not below zero
            for (int v = 0; v < 4; v++)
                sums[v] = _mm512_set1_epi32(int32_t(uint32_t(start) - 128u * uint32_t(isum)));
            for (int j = 0; j < block.n_quads; j++) {
                __m512i row[4], codes[4];
                for (int i = 0; i < 4; i++) row[i] = _mm512_maskz_loadu_epi8(some, block.row(4 * j + i) + c);
                if (j < ahead.n_quads)
                    for (int i = 0; i < 4; i++) V::fetch(ahead.row(4 * j + i) + c);
                interleave(row, codes);
                const __m512i q = _mm512_set1_epi32(int32_t(block.quads[j])), sign = _mm512_set1_epi8(-128);
                for (int v = 0; v < 4; v++)
                    sums[v] = _mm512_dpbusd_epi32(sums[v], _mm512_xor_si512(codes[v], sign), q);
            }
            for (int j = block.n_quads; j < ahead.n_quads; j++)
                for (int i = 0; i < 4; i++) V::fetch(ahead.row(4 * j + i) + c);
            transpose_groups(sums);
            for (int g = 0; g < 4; g++) _mm512_store_si512(dots + c + 16 * g, sums[g]);
        }
    }
}
