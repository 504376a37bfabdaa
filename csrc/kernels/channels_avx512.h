// Integer part of channel_kernels.h. The codes of four channels are interleaved, so that one dpbusd adds four
// terms. Included inside the namespace of an instruction set.

// Interleave four rows a, b, c, d: out[v] gets (a[i] b[i] c[i] d[i]) for i = 4 v .. 4 v + 3 of each 16 bytes.
inline void interleave(const __m512i* row, __m512i* out) {
    const __m512i ab0 = _mm512_unpacklo_epi8(row[0], row[1]), ab1 = _mm512_unpackhi_epi8(row[0], row[1]);
    const __m512i cd0 = _mm512_unpacklo_epi8(row[2], row[3]), cd1 = _mm512_unpackhi_epi8(row[2], row[3]);
    out[0] = _mm512_unpacklo_epi16(ab0, cd0);
    out[1] = _mm512_unpackhi_epi16(ab0, cd0);
    out[2] = _mm512_unpacklo_epi16(ab1, cd1);
    out[3] = _mm512_unpackhi_epi16(ab1, cd1);
}

// sums[v] holds elements 4 v .. 4 v + 3 of four groups of 16. Store group g to out[stride * g].
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

// Load the bytes of one plane of high bits for four channels, interleaved. For 32 outputs a lane has four
// bytes per channel; byte i holds bits of outputs i, i + 4, i + 8, ...
inline __m512i high_bytes(const uint8_t* const* row, int64_t at, __mmask8 some) {
    const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m128i bytes = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i codes = _mm512_castsi128_si512(_mm_maskz_loadu_epi32(some, row[0] + at));
    codes = _mm512_inserti32x4(codes, _mm_maskz_loadu_epi32(some, row[1] + at), 1);
    codes = _mm512_inserti32x4(codes, _mm_maskz_loadu_epi32(some, row[2] + at), 2);
    codes = _mm512_inserti32x4(codes, _mm_maskz_loadu_epi32(some, row[3] + at), 3);
    return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(lanes, codes), _mm512_broadcast_i32x4(bytes));
}

template <bool kFour, int kHigh>
HOTSET_INLINE void block_dots(const ChannelRows& rows, int64_t col, int n_cols, int32_t start, V* dots) {
    constexpr int kColumns = kFour ? 128 : 64;  // columns per 64 bytes
    for (int c = 0; c < kChannelColumns; c += kColumns) {
        const int bytes = imax(0, imin(kColumns, n_cols - c)) * 64 / kColumns;
        const __mmask64 some = bytes ? ~uint64_t(0) >> (64 - bytes) : 0;
        const int64_t at = (col + c) * 64 / kColumns;
        // With four bits, `sums` holds the sums of whole bytes: sixteen times the high codes' plus the low
        // ones'. above: sums of the high bits, first those for `low`, then the others.
        __m512i sums[4], low[4], above[8];
        const __mmask8 groups = __mmask8((1 << imax(0, imin(kColumns, n_cols - c)) / 32) - 1);
        const __m512i field = _mm512_set1_epi8((1 << kHigh) - 1);
        for (__m512i& sum : above) sum = _mm512_setzero_si512();
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
            if constexpr (kHigh > 0) {
                __m512i planes[2];
                const int64_t plane = rows.high + (col + c) / 8;
                for (int p = 0; p < kHigh; p++)
                    planes[p] = high_bytes(rows.row + 4 * j, plane + p * rows.plane, groups);
                for (int v = 0; v < 8; v++) {
                    const __m512i bits = _mm512_srli_epi16(planes[v * kHigh / 8], v * kHigh % 8);
                    above[v] = _mm512_dpbusd_epi32(above[v], _mm512_and_si512(bits, field), q);
                }
            }
        }
        if constexpr (kFour) {
            for (int v = 0; v < 4; v++) {
                sums[v] = _mm512_srai_epi32(_mm512_sub_epi32(sums[v], low[v]), 4);
                if constexpr (kHigh > 0) {
                    low[v] = _mm512_add_epi32(low[v], _mm512_slli_epi32(above[v], 4));
                    sums[v] = _mm512_add_epi32(sums[v], _mm512_slli_epi32(above[v + 4], 4));
                }
            }
            order_groups(low, dots, 2);
            order_groups(sums, dots + 1, 2);
        } else {
            order_groups(sums, dots + c / 16, 1);
        }
    }
}
