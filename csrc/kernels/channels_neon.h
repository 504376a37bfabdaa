// Integer parts of channel_kernels.h. Four channels' codes are interleaved, so that a vdot adds four terms.
// Included inside the namespace of an instruction set.

inline V load_i32(const int32_t* p) {
    V r;
    for (int i = 0; i < 4; i++) r.v[i] = vcvtq_f32_s32(vld1q_s32(p + 4 * i));
    return r;
}

// Of four rows a, b, c, d the bytes (a[i] b[i] c[i] d[i]), i = 4 v .. 4 v + 3 in out[v].
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

template <bool kFour>
inline void channel_dots(const ChannelBlock& block, const ChannelBlock& ahead, int n_cols, int32_t start,
                         int32_t, int32_t* dots) {
    constexpr int kColumns = kFour ? 32 : 16;  // of 16 bytes
    for (int j = 0; j < 4 * ahead.n_quads; j++)
        for (int line = 0; line < n_cols * 16 / kColumns; line += 64) V::fetch(ahead.row(j) + line);
    for (int c = 0; c < n_cols; c += kColumns) {
        int32x4_t low[4], high[4];
        for (int v = 0; v < 4; v++) low[v] = high[v] = vdupq_n_s32(start);
        for (int j = 0; j < block.n_quads; j++) {
            uint8x16_t row[4], codes[4];
            for (int i = 0; i < 4; i++) row[i] = vld1q_u8(block.row(4 * j + i) + c * 16 / kColumns);
            interleave(row, codes);
            const int8x16_t q = vreinterpretq_s8_u32(vdupq_n_u32(block.quads[j]));
            for (int v = 0; v < 4; v++) {
                if constexpr (kFour) {
                    low[v] = vdotq_s32(low[v], vreinterpretq_s8_u8(vandq_u8(codes[v], vdupq_n_u8(15))), q);
                    high[v] = vdotq_s32(high[v], vreinterpretq_s8_u8(vshrq_n_u8(codes[v], 4)), q);
                } else {
                    low[v] = vdotq_s32(low[v], vreinterpretq_s8_u8(codes[v]), q);
                }
            }
        }
        for (int v = 0; v < 4; v++) {
            vst1q_s32(dots + c + 4 * v, low[v]);
            if constexpr (kFour) vst1q_s32(dots + c + 16 + 4 * v, high[v]);
        }
    }
}
