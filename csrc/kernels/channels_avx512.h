// Integer part of channel_kernels.h. Four channels' codes are interleaved, so that a dpbusd adds four terms.
// Included inside the namespace of an instruction set.

// Of four rows a, b, c, d the bytes (a[i] b[i] c[i] d[i]), i = 4 v .. 4 v + 3 of each 16 bytes in out[v].
inline void interleave(const __m512i* row, __m512i* out) {
    const __m512i ab0 = _mm512_unpacklo_epi8(row[0], row[1]), ab1 = _mm512_unpackhi_epi8(row[0], row[1]);
    const __m512i cd0 = _mm512_unpacklo_epi8(row[2], row[3]), cd1 = _mm512_unpackhi_epi8(row[2], row[3]);
    out[0] = _mm512_unpacklo_epi16(ab0, cd0);
    out[1] = _mm512_unpackhi_epi16(ab0, cd0);
    out[2] = _mm512_unpacklo_epi16(ab1, cd1);
    out[3] = _mm512_unpackhi_epi16(ab1, cd1);
}

// sums[v] holds 4 v .. 4 v + 3 of each of four groups of 16: out[stride * g] becomes group g.
inline void order_groups(const __m512i* sums, V* out, int stride) {
    const __m512i a = _mm512_shuffle_i32x4(sums[0], sums[1], 0x44),
                  b = _mm512_shuffle_i32x4(sums[2], sums[3], 0x44);
    const __m512i c = _mm512_shuffle_i32x4(sums[0], sums[1], 0xee),
                  d = _mm512_shuffle_i32x4(sums[2], sums[3], 0xee);
    out[0] = {_mm512_cvtepi32_ps(_mm512_shuffle_i32x4(a, b, 0x88))};
    out[stride] = {_mm512_cvtepi32_ps(_mm512_shuffle_i32x4(a, b, 0xdd))};
    out[2 * stride] = {_mm512_cvtepi32_ps(_mm512_shuffle_i32x4(c, d, 0x88))};
    out[3 * stride] = {_mm512_cvtepi32_ps(_mm512_shuffle_i32x4(c, d, 0xdd))};
}

template <bool kFour>
HOTSET_INLINE void block_dots(const ChannelRows& rows, int64_t col, int n_cols, int32_t start, V* dots) {
    constexpr int kColumns = kFour ? 128 : 64;  // of 64 bytes
    for (int c = 0; c < kChannelColumns; c += kColumns) {
        const int bytes = imax(0, imin(kColumns, n_cols - c)) * 64 / kColumns;
        const __mmask64 some = bytes ? ~uint64_t(0) >> (64 - bytes) : 0;
        const int64_t at = (col + c) * 64 / kColumns;
        // Of four bits, `sums` are those of whole bytes: sixteen times the high codes', and the low ones'.
        __m512i sums[4], low[4];
        for (int v = 0; v < 4; v++) {
            sums[v] = _mm512_set1_epi32(int32_t((kFour ? 17 : 1) * uint32_t(start)));
            low[v] = _mm512_set1_epi32(start);
        }
        for (int j = 0; j < rows.n_quads; j++) {
            const __m512i q = _mm512_set1_epi32(int32_t(rows.quads[j]));
            __m512i row[4], codes[4];
            for (int i = 0; i < 4; i++) row[i] = _mm512_maskz_loadu_epi8(some, rows.row[4 * j + i] + at);
            interleave(row, codes);
            for (int v = 0; v < 4; v++) {
                if constexpr (kFour)
                    low[v] = _mm512_dpbusd_epi32(low[v], _mm512_and_si512(codes[v], _mm512_set1_epi8(15)), q);
                else
                    codes[v] = _mm512_xor_si512(codes[v], _mm512_set1_epi8(-128));
                sums[v] = _mm512_dpbusd_epi32(sums[v], codes[v], q);
            }
        }
        if constexpr (kFour) {
            for (int v = 0; v < 4; v++) sums[v] = _mm512_srai_epi32(_mm512_sub_epi32(sums[v], low[v]), 4);
            order_groups(low, dots, 2);
            order_groups(sums, dots + 1, 2);
        } else {
            order_groups(sums, dots + c / 16, 1);
        }
    }
}
