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

template <bool kFour, bool kFetch>
inline void add_quad(const ChannelQuad& here, const ChannelQuad& ahead, uint32_t quad, int n_cols, bool first,
                     int32_t start, int32_t* sums) {
    constexpr int kColumns = kFour ? 32 : 16;  // of 16 bytes
    const uint8x16_t nibble = vdupq_n_u8(15);
    const int8x16_t q = vreinterpretq_s8_u32(vdupq_n_u32(quad));
    // code + 128 as a signed byte is code, and what is added for it: 128 times the sum of the quad's bytes.
    const int32_t sum = int8_t(quad) + int8_t(quad >> 8) + int8_t(quad >> 16) + int8_t(quad >> 24);
    const int32x4_t offset = vdupq_n_s32(kFour ? 0 : 128 * sum);
    for (int c = 0; c < n_cols; c += kColumns) {
        const int at = c * 16 / kColumns;
        uint8x16_t row[4], codes[4];
        for (int i = 0; i < 4; i++) {
            row[i] = vld1q_u8(here.row[i] + at);
            if (kFetch && at % 64 == 0) V::fetch(ahead.row[i] + at);
        }
        interleave(row, codes);
        auto add = [&](int32_t* to, uint8x16_t of) {
            const int32x4_t before = first ? vdupq_n_s32(start) : vld1q_s32(to);
            vst1q_s32(to, vdotq_s32(vaddq_s32(before, offset), vreinterpretq_s8_u8(of), q));
        };
        for (int v = 0; v < 4; v++) {
            if constexpr (kFour) {
                add(sums + c + 4 * v, vandq_u8(codes[v], nibble));
                add(sums + c + 16 + 4 * v, vshrq_n_u8(codes[v], 4));
            } else {
                add(sums + c + 4 * v, codes[v]);
            }
        }
    }
}

template <bool kFour>
inline void order_sums(const int32_t* sums, int32_t* dots) {
    for (int c = 0; c < kChannelColumns; c += 4) vst1q_s32(dots + c, vld1q_s32(sums + c));
}
