// The readable twin of channels_avx2.h, channels_avx512.h and channels_neon.h: see channel_kernels.h.
// Included inside the namespace of an instruction set.

inline V load_i32(const int32_t* p) {
    V r;
    for (int i = 0; i < 16; i++) r.v[i] = float(p[i]);
    return r;
}

template <bool kFour, bool kFetch>
void add_quad(const ChannelQuad& here, const ChannelQuad&, uint32_t q, int n_cols, bool first, int32_t start,
              int32_t* sums) {
    for (int c = 0; c < n_cols; c++) {
        uint32_t sum = uint32_t(first ? start : sums[c]);
        for (int i = 0; i < 4; i++) {
            const uint8_t* row = here.row[i];
            const int code = kFour ? (row[c / 32 * 16 + c % 16] >> c % 32 / 16 * 4) & 15 : row[c] ^ 128;
            sum += uint32_t(code * int8_t(q >> i * 8));
        }
        sums[c] = int32_t(sum);
    }
}

template <bool kFour>
void order_sums(const int32_t* sums, int32_t* dots) {
    for (int c = 0; c < kChannelColumns; c++) dots[c] = sums[c];
}
