// Integer part of channel_kernels.h. The codes of four channels are interleaved, so that one maddubs adds two
// terms to each half of an int32. An eight-bit code is processed as two four-bit codes. So a half holds the
// sum of a block's 32 channels: at most 16 * 2 * 15 * 128 = 61,440, split into two halves of 30,720. Included
// inside the namespace of an instruction set.

// Interleave four rows a, b, c, d: out[v] gets (a[i] b[i] c[i] d[i]) for i = 4 v .. 4 v + 3 of each 16 bytes.
inline void interleave(const __m256i* row, __m256i* out) {
    const __m256i ab0 = _mm256_unpacklo_epi8(row[0], row[1]), ab1 = _mm256_unpackhi_epi8(row[0], row[1]);
    const __m256i cd0 = _mm256_unpacklo_epi8(row[2], row[3]), cd1 = _mm256_unpackhi_epi8(row[2], row[3]);
    out[0] = _mm256_unpacklo_epi16(ab0, cd0);
    out[1] = _mm256_unpackhi_epi16(ab0, cd0);
    out[2] = _mm256_unpacklo_epi16(ab1, cd1);
    out[3] = _mm256_unpackhi_epi16(ab1, cd1);
}

// sums[v] holds elements 4 v .. 4 v + 3 of two groups of 16. Store group g to out[stride * g].
inline void order_groups(const __m256i* sums, V* out, int stride) {
    auto pair = [](__m256i a, __m256i b, auto half) {
        return _mm256_cvtepi32_ps(_mm256_permute2x128_si256(a, b, decltype(half)::value));
    };
    constexpr std::integral_constant<int, 0x20> lower;
    constexpr std::integral_constant<int, 0x31> upper;
    out[0] = {pair(sums[0], sums[1], lower), pair(sums[2], sums[3], lower)};
    out[stride] = {pair(sums[0], sums[1], upper), pair(sums[2], sums[3], upper)};
}

// Load 32 bytes of a row, or its last 16.
inline __m256i row_bytes(const uint8_t* p, bool whole) {
    if (whole) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Load the bytes of one plane of high bits for four channels, interleaved. For 32 outputs a lane has four
// bytes per channel; byte i holds bits of outputs i, i + 4, i + 8, ...
inline __m256i high_bytes(const uint8_t* const* row, int64_t at, bool whole) {
    const __m256i lanes = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    const __m128i bytes = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    auto load = [=](int i) {
        long long of_row = 0;
        std::memcpy(&of_row, row[i] + at, whole ? 8 : 4);
        return of_row;
    };
    const __m256i codes = _mm256_setr_epi64x(load(0), load(1), load(2), load(3));
    return _mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(codes, lanes), _mm256_broadcastsi128_si256(bytes));
}

// Add the high bits' part of 64 columns to the sums `low` and `high`, in the order of order_groups. In half
// an int32, 32 channels add up to at most 16 * 3 * 128 = 6,144.
template <int kHigh>
HOTSET_INLINE void add_high(const ChannelRows& rows, int64_t at, bool whole, __m256i* low, __m256i* high) {
    const __m256i field = _mm256_set1_epi8((1 << kHigh) - 1), ones = _mm256_set1_epi16(1);
    for (int p = 0; p < 2; p++) {
        __m256i above[4], *to = p ? high : low;
        for (__m256i& sum : above) sum = _mm256_setzero_si256();
        for (int j = 0; j < rows.n_quads; j++) {
            const __m256i q = _mm256_set1_epi32(int32_t(rows.quads[j]));
            const int64_t plane = at + (kHigh == 2 ? p * rows.plane : 0);
            __m256i bytes = high_bytes(rows.row + 4 * j, plane, whole);
            if (kHigh == 1 && p) bytes = _mm256_srli_epi16(bytes, 4);
            for (int v = 0; v < 4; v++) {
                const __m256i bits = _mm256_and_si256(_mm256_srli_epi16(bytes, v * kHigh), field);
                above[v] = _mm256_add_epi16(above[v], _mm256_maddubs_epi16(bits, q));
            }
        }
        for (int v = 0; v < 4; v++)
            to[v] = _mm256_add_epi32(to[v], _mm256_slli_epi32(_mm256_madd_epi16(above[v], ones), 4));
    }
}

template <bool kFour, int kHigh>
HOTSET_INLINE void block_dots(const ChannelRows& rows, int64_t col, int n_cols, int32_t start, V* dots) {
    constexpr int kColumns = kFour ? 64 : 32;  // columns per 32 bytes
    const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1), from = _mm256_set1_epi32(start);
    for (int c = 0; c < n_cols; c += kColumns) {
        const int64_t at = (col + c) * 32 / kColumns;
        const bool whole = n_cols - c >= kColumns;
        __m256i low[4], high[4];
        for (int v = 0; v < 4; v++) low[v] = high[v] = _mm256_setzero_si256();
        for (int j = 0; j < rows.n_quads; j++) {
            const __m256i q = _mm256_set1_epi32(int32_t(rows.quads[j]));
            __m256i row[4], codes[4];
            for (int i = 0; i < 4; i++) row[i] = row_bytes(rows.row[4 * j + i] + at, whole);
            interleave(row, codes);
            for (int v = 0; v < 4; v++) {
                if constexpr (!kFour) codes[v] = _mm256_xor_si256(codes[v], _mm256_set1_epi8(-128));
                const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(codes[v], 4), nibble);
                low[v] =
                    _mm256_add_epi16(low[v], _mm256_maddubs_epi16(_mm256_and_si256(codes[v], nibble), q));
                high[v] = _mm256_add_epi16(high[v], _mm256_maddubs_epi16(upper, q));
            }
        }
        for (int v = 0; v < 4; v++) {
            low[v] = _mm256_add_epi32(from, _mm256_madd_epi16(low[v], ones));
            high[v] = _mm256_madd_epi16(high[v], ones);
            if constexpr (kFour)
                high[v] = _mm256_add_epi32(from, high[v]);
            else
                low[v] = _mm256_add_epi32(low[v], _mm256_slli_epi32(high[v], 4));
        }
        if constexpr (kHigh > 0) add_high<kHigh>(rows, rows.high + (col + c) / 8, whole, low, high);
        order_groups(low, dots + c / 16, kFour ? 2 : 1);
        if constexpr (kFour) order_groups(high, dots + c / 16 + 1, 2);
    }
}
