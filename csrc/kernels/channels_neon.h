// Integer part of channel_kernels.h. The codes of four channels are interleaved, so that one vdot adds four
// terms. Included inside the namespace of an instruction set.

// Interleave four rows a, b, c, d: out[v] gets (a[i] b[i] c[i] d[i]) for i = 4 v .. 4 v + 3.
inline void interleave(const uint8x16_t* row, uint8x16_t* out) {
    const uint16x8_t ab0 = vreinterpretq_u16_u8(vzip1q_u8(row[0], row[1]));
    const uint16x8_t ab1 = vreinterpretq_u16_u8(vzip2q_u8(row[0], row[1]));
    const uint16x8_t cd0 = vreinterpretq_u16_u8(vzip1q_u8(row[2], row[3]));
    const uint16x8_t cd1 = vreinterpretq_u16_u8(vzip2q_u8(row[2], row[3]));
    out[0] = vreinterpretq_u8_u16(vzip1q_u16(ab0, cd0));
    out[1] = vreinterpretq_u8_u16(vzip2q_u16(ab0, cd0));
    out[2] = vreinterpretq_u8_u16(vzip1q_u16(ab1, cd1));
    out[3] = vreinterpretq_u8_u16(vzip2q_u16(ab1, cd1));
}

// Load the bytes of one plane of high bits for four channels, interleaved, four bytes each. Byte i holds bits
// of outputs i, i + 4, i + 8, ... of 32.
inline uint8x16_t high_bytes(const uint8_t* const* row, int64_t at) {
    constexpr uint8_t kBytes[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    uint32_t of_row[4];
    for (int i = 0; i < 4; i++) of_row[i] = load_u32(row[i] + at);
    return vqtbl1q_u8(vreinterpretq_u8_u32(vld1q_u32(of_row)), vld1q_u8(kBytes));
}

template <bool kFour, int kHigh>
HOTSET_INLINE void block_dots(const ChannelRows& rows, int64_t col, int n_cols, int32_t start, V* dots) {
    constexpr int kColumns = kFour ? 32 : 16;  // columns per 16 bytes
    // Read as a signed byte, an eight-bit code equals its value: no correction is needed.
    const int32x4_t from = vdupq_n_s32(kFour ? start : 0);
    for (int c = 0; c < n_cols; c += kColumns) {
        const int64_t at = (col + c) * 16 / kColumns;
        int32x4_t low[4] = {from, from, from, from}, high[4] = {from, from, from, from};
        int32x4_t above[8];  // sums of the high bits, first for `low`, then for `high`
        for (int32x4_t& sum : above) sum = vdupq_n_s32(0);
        for (int j = 0; j < rows.n_quads; j++) {
            const int8x16_t q = vreinterpretq_s8_u32(vdupq_n_u32(rows.quads[j]));
            uint8x16_t row[4], codes[4];
            for (int i = 0; i < 4; i++) row[i] = vld1q_u8(rows.row[4 * j + i] + at);
            interleave(row, codes);
            for (int v = 0; v < 4; v++) {
                const uint8x16_t lower = kFour ? vandq_u8(codes[v], vdupq_n_u8(15)) : codes[v];
                low[v] = vdotq_s32(low[v], vreinterpretq_s8_u8(lower), q);
                if constexpr (kFour)
                    high[v] = vdotq_s32(high[v], vreinterpretq_s8_u8(vshrq_n_u8(codes[v], 4)), q);
            }
            if constexpr (kHigh > 0) {
                uint8x16_t planes[2];
                const int64_t plane = rows.high + (col + c) / 8;
                for (int p = 0; p < kHigh; p++)
                    planes[p] = high_bytes(rows.row + 4 * j, plane + p * rows.plane);
                for (int v = 0; v < 8; v++) {
                    const uint8x16_t bits =
                        vshlq_u8(planes[v * kHigh / 8], vdupq_n_s8(int8_t(-(v * kHigh % 8))));
                    const uint8x16_t field = vandq_u8(bits, vdupq_n_u8((1 << kHigh) - 1));
                    above[v] = vdotq_s32(above[v], vreinterpretq_s8_u8(field), q);
                }
            }
        }
        if constexpr (kHigh > 0)
            for (int v = 0; v < 4; v++) {
                low[v] = vaddq_s32(low[v], vshlq_n_s32(above[v], 4));
                high[v] = vaddq_s32(high[v], vshlq_n_s32(above[v + 4], 4));
            }
        for (int v = 0; v < 4; v++) {
            dots[c / 16].v[v] = vcvtq_f32_s32(low[v]);
            if constexpr (kFour) dots[c / 16 + 1].v[v] = vcvtq_f32_s32(high[v]);
        }
    }
}
